"""Grouped matmul and row operations of a mixture of experts, with backward passes that save and move less.

Autograd's own backward would save inputs of which only the shape is needed, or that can be recomputed. It also cannot
know that indices are distinct, and scatter-adds rows in nondeterministic order on CUDA.

Shapes: T tokens, D dim, R rows (one per token and choice), P rows after padding, F width inside an expert.

Grouped matmul: each group of consecutive rows times its own matrix.
Uses torch's kernel for bfloat16 with rows of a multiple of 16 bytes: the kernel rejects other widths, supports float32
only when compiled (2.13), and is no faster than a loop on CPU. Otherwise a custom operator loops over groups: their
sizes are data, at which the compiler would break the graph.

Shapes: E experts (groups), R rows, I width in, O width out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def token_rows(x_TD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
    """Return rows_RD with K rows per token; row r is choice order_R[r], and place_R is the inverse permutation."""
    rows_RD: Tensor = _TokenRows.apply(x_TD, order_R, place_R)  # type: ignore[no-untyped-call]
    return rows_RD


def reorder(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return rows_RD[order_R]; inverse_R is the inverse permutation."""
    ordered_RD: Tensor = _Reorder.apply(rows_RD, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return ordered_RD


def spread(rows_RD: Tensor, place_R: Tensor, num_rows: int) -> Tensor:
    """Return `num_rows` rows, zeros except row r of rows_RD at place_R[r]; places are distinct."""
    padded_PD: Tensor = _Spread.apply(rows_RD, place_R, num_rows)  # type: ignore[no-untyped-call]
    return padded_PD


def collect(padded_PD: Tensor, place_R: Tensor) -> Tensor:
    """Return padded_PD[place_R], the inverse of `spread`."""
    rows_RD: Tensor = _Collect.apply(padded_PD, place_R)  # type: ignore[no-untyped-call]
    return rows_RD


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """Return silu(gate_RF) * up_RF; backward recomputes silu, which saves a quarter of the activations."""
    product_RF: Tensor = _SwiGLU.apply(gate_RF, up_RF)  # type: ignore[no-untyped-call]
    return product_RF


class _TokenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.shape = (x_TD.shape[0], -1, x_TD.shape[1])
        return x_TD[order_R // (len(order_R) // len(x_TD))]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return gradient_RD[place_R].view(ctx.shape).sum(1), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return gradient_RD[inverse_R], None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, place_R: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(place_R)
        return _placed(rows_RD, place_R, num_rows)

    @staticmethod
    def backward(ctx: Any, gradient_PD: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return gradient_PD[place_R], None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded_PD: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.num_rows = len(padded_PD)
        return padded_PD[place_R]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None]:
        (place_R,) = ctx.saved_tensors
        # One more row: the compiler would otherwise reuse the zeros of `spread` and save them for backward.
        return _placed(gradient_RD, place_R, ctx.num_rows + 1)[:-1], None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        return F.silu(gate_RF) * up_RF

    @staticmethod
    def backward(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor, Tensor]:
        gate_RF, up_RF = ctx.saved_tensors
        gate_gradient_RF: Tensor = torch.ops.aten.silu_backward(gradient_RF * up_RF, gate_RF)
        return gate_gradient_RF, gradient_RF * F.silu(gate_RF)


def _placed(rows_RD: Tensor, place_R: Tensor, num_rows: int) -> Tensor:
    zeros_PD = rows_RD.new_zeros(num_rows, rows_RD.shape[1])
    # In torch 2.11 a compiled in-place write loses the gradient; Inductor makes it in place itself.
    copy = zeros_PD.index_copy if torch.compiler.is_compiling() else zeros_PD.index_copy_
    return copy(0, place_R, rows_RD)


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
