"""Row operations of a mixture of experts, with backward passes that save less and gather instead of scatter-adding.

Autograd's own backward would save inputs of which only the shape is needed, or that can be recomputed. It also cannot
know that indices are distinct, and scatter-adds rows in nondeterministic order on CUDA.

Shapes: T tokens, D dim, R rows (one per token and choice), P rows after padding, F width inside an expert, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.grouped_matmul import group_sums


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


def add_expert_bias(rows_RF: Tensor, bias_EF: Tensor, counts_E: Tensor) -> Tensor:
    """Return rows_RF plus the bias of each row's expert; rows are sorted by expert, counts_E of each."""
    biased_RF: Tensor = _AddExpertBias.apply(rows_RF, bias_EF, counts_E)  # type: ignore[no-untyped-call]
    return biased_RF


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


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RF: Tensor, bias_EF: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E)
        row_R = torch.arange(len(rows_RF), device=rows_RF.device)
        expert_R = torch.searchsorted(counts_E.cumsum(0), row_R, right=True)
        # Rows after the last expert's are padding.
        return rows_RF + bias_EF[expert_R.clamp(max=len(bias_EF) - 1)]

    @staticmethod
    def backward(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        (counts_E,) = ctx.saved_tensors
        return gradient_RF, group_sums(gradient_RF, counts_E), None


def _placed(rows_RD: Tensor, place_R: Tensor, num_rows: int) -> Tensor:
    zeros_PD = rows_RD.new_zeros(num_rows, rows_RD.shape[1])
    # In torch 2.11 a compiled in-place write loses the gradient; Inductor makes it in place itself.
    copy = zeros_PD.index_copy if torch.compiler.is_compiling() else zeros_PD.index_copy_
    return copy(0, place_R, rows_RD)
