"""Grouped matmul: each group of consecutive rows times its own matrix.

Uses torch's kernel for bfloat16 with rows of a multiple of 16 bytes: the kernel rejects other widths, supports float32
only when compiled (2.13), and is no faster than a loop on CPU. Otherwise a custom operator loops over groups: their
sizes are data, at which the compiler would break the graph.

Shapes: E experts (groups), R rows, I width in, O width out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_KERNEL_WIDTH_BYTES = 16
_CUDA_GROUP_ROWS = 8


def grouped_matmul(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Return rows_RO: the first counts_E[0] rows times weight_EOI[0]^T, and so on; groups may be empty.

    Result rows after the last group are undefined, and do not contribute to the weight's gradient.
    """
    if _kernel_takes(rows_RI, weight_EOI):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    product: Tensor = _by_loop(rows_RI, weight_EOI, counts_E)
    return product


def grouped_weight_gradient(gradient_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """Return gradient_EOI: for each group the sum over its rows of gradient_RO^T times rows_RI."""
    if _kernel_takes(rows_RI, gradient_RO[None]) and _kernel_takes(rows_RI, rows_RI[None]):
        return F.grouped_mm(gradient_RO.T, rows_RI, offs=counts_E.cumsum(0).to(torch.int32))
    gradient_EOI: Tensor = _weight_gradient(gradient_RO, rows_RI, counts_E)
    return gradient_EOI


def group_sums(rows_RO: Tensor, counts_E: Tensor) -> Tensor:
    """Return sums_EO of the first counts_E[0] rows, and so on: in a fixed order, which a scatter-add on CUDA lacks."""
    ones_RI = rows_RO.new_ones(rows_RO.shape[0], _KERNEL_WIDTH_BYTES // rows_RO.element_size())
    if _kernel_takes(rows_RO, rows_RO[None]):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows_RO.T, ones_RI, offs=ends_E)[..., 0]
    sums_EO: Tensor = _weight_gradient(rows_RO, ones_RI, counts_E)[..., 0]
    return sums_EO


def required_alignment(rows: Tensor) -> int:
    """Return the required multiple of each group's number of rows, for the dtype and device of `rows`.

    Undocumented in torch: on CUDA the weights' gradient needs groups that start at a multiple of 16 bytes.
    """
    return _CUDA_GROUP_ROWS if rows.device.type != "cpu" and rows.dtype == torch.bfloat16 else 1


def _kernel_takes(rows_RI: Tensor, weight_EOI: Tensor) -> bool:
    widths_bytes = [width * rows_RI.element_size() for width in weight_EOI.shape[1:]]
    return rows_RI.dtype == torch.bfloat16 and not any(width % _KERNEL_WIDTH_BYTES for width in widths_bytes)


@torch.library.custom_op("meshwright::grouped_matmul_by_loop", mutates_args=())
def _by_loop(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    product_RO = rows_RI.new_zeros(rows_RI.shape[0], weight_EOI.shape[1])
    end = 0
    for expert, count in enumerate(counts_E.tolist()):
        start, end = end, end + count
        product_RO[start:end] = rows_RI[start:end] @ weight_EOI[expert].T
    return product_RO


@torch.library.custom_op("meshwright::grouped_matmul_by_loop_weight_gradient", mutates_args=())
def _weight_gradient(gradient_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    gradient_EOI = rows_RI.new_zeros(counts_E.shape[0], gradient_RO.shape[1], rows_RI.shape[1])
    end = 0
    for expert, count in enumerate(counts_E.tolist()):
        start, end = end, end + count
        gradient_EOI[expert] = gradient_RO[start:end].T @ rows_RI[start:end]
    return gradient_EOI


@_by_loop.register_fake
def _(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])


@_weight_gradient.register_fake
def _(gradient_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    return rows_RI.new_empty(counts_E.shape[0], gradient_RO.shape[1], rows_RI.shape[1])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    rows_RI, weight_EOI, counts_E = ctx.saved_tensors  # type: ignore[attr-defined]
    gradient_RI = _by_loop(gradient_RO, weight_EOI.transpose(1, 2), counts_E)
    return gradient_RI, _weight_gradient(gradient_RO, rows_RI, counts_E), None


_by_loop.register_autograd(_backward, setup_context=_keep)
