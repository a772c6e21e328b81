"""Experts' grouped matmuls in float8, by rows: forward and the gradient of rows; that of weights stays in compute.

    output = rows w^T    gradient of rows = g w    in e4m3, a power-of-two scale for each row along which a matmul sums

A row of the gradient of weights is summed over the tokens that an expert is sent, which depends on ep: products of
16 bits keep it independent of the layout. With etp a rank scales its part of a row; since scales are powers of two,
that changes only what underflows. torch._scaled_grouped_mm needs compute capability 9.0.

Shapes: E experts (groups), R rows, I width in, O width out.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.models.grouped_matmul import grouped_weight_gradient
from meshwright.parallelism.torch_private.torch_scaled_matmul import row_scaled_grouped_matmul, to_row_scaled
from meshwright.parallelism.torch_private.torch_split_backward import is_needed


class Float8GroupedMatmul:
    """Callable in place of models.grouped_matmul.grouped_matmul."""

    def __init__(self, *, emulates: bool) -> None:
        """`emulates` computes products of rounded operands in float32."""
        self._emulates = emulates

    def __call__(self, rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """Return rows_RO in the dtype of rows_RI: the first counts_E[0] rows times weight_EOI[0]^T, and so on."""
        # A view: a leaf could not be asked whether its gradient is needed (is_needed).
        product: Tensor = _Float8Grouped.apply(  # type: ignore[no-untyped-call]
            rows_RI, weight_EOI.transpose(1, 2), counts_E, self._emulates
        )
        return product


@torch._dynamo.allow_in_graph
class _Float8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor, emulates: bool) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_EIO, counts_E)
        ctx.emulates = emulates
        return _product(rows_RI, weight_EIO.transpose(1, 2), counts_E, emulates)

    @staticmethod
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_RI, weight_EIO, counts_E = ctx.saved_tensors
        of_rows, of_weight = None, None
        if is_needed(ctx, 0):
            of_rows = _product(gradient_RO, weight_EIO, counts_E, ctx.emulates)
        if is_needed(ctx, 1):
            of_weight = grouped_weight_gradient(gradient_RO, rows_RI, counts_E).transpose(1, 2)
        return of_rows, of_weight, None, None


def _product(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, emulates: bool) -> Tensor:
    low = to_row_scaled(rows_RI), to_row_scaled(weight_EOI.contiguous())
    return row_scaled_grouped_matmul(*low, counts_E, emulates=emulates).to(rows_RI.dtype)
