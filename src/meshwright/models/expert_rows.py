"""What a mixture does to rows besides matmuls, with backward passes that keep less and gather instead of adding.

Autograd's own backward of these keeps inputs of which it needs the shape only, or that it could recompute. And it does
not know that no two indices are the same: it adds row by row, in an order that CUDA does not promise.

Shapes: T tokens, D dim, R rows (one for each token and choice), P rows after padding, F width inside an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def token_rows(x_TD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
    """Return K rows of each token: row r is that of choice order_R[r], whose inverse is place_R."""
    rows_RD: Tensor = _TokenRows.apply(x_TD, order_R, place_R)  # type: ignore[no-untyped-call]
    return rows_RD


def reorder(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return rows_RD[order_R], whose inverse is inverse_R."""
    ordered_RD: Tensor = _Reorder.apply(rows_RD, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return ordered_RD


def spread(rows_RD: Tensor, place_R: Tensor, num_rows: int) -> Tensor:
    """Return `num_rows` rows: row r of rows_RD at place_R[r], which are distinct, and zeros elsewhere."""
    padded_PD: Tensor = _Spread.apply(rows_RD, place_R, num_rows)  # type: ignore[no-untyped-call]
    return padded_PD


def collect(padded_PD: Tensor, place_R: Tensor) -> Tensor:
    """Return padded_PD[place_R], the inverse of `spread`."""
    rows_RD: Tensor = _Collect.apply(padded_PD, place_R)  # type: ignore[no-untyped-call]
    return rows_RD


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """Return silu(gate_RF) * up_RF; backward recomputes silu, a quarter of what it would need of experts."""
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
        # One row more: the compiler would take the zeros for those of `spread`, and keep them from forward to backward.
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
    # What is compiled loses its gradient in torch 2.11 if it writes in place here; Inductor does so by itself.
    copy = zeros_PD.index_copy if torch.compiler.is_compiling() else zeros_PD.index_copy_
    return copy(0, place_R, rows_RD)
