"""torch's matmuls of 8-bit operands with scales, and their emulation where there are no units for them.

torch._scaled_mm and torch._scaled_grouped_mm are private (2.11 to 2.13). Emulated, operands are multiplied in float32.

Shapes: T rows, I what is summed over, O width out, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.utils import to_blocked

from meshwright.models.grouped_matmul import grouped_matmul
from meshwright.spec.model.op import MXFP8_BLOCK

LOW = torch.float8_e4m3fn


class BlockScaled(NamedTuple):
    """A matrix in MXFP8: 8 bits an element, and a power of two for each 32 elements of a row."""

    data_TI: Tensor
    scales_TB: Tensor


def to_block_scaled(matrix_TI: Tensor) -> BlockScaled:
    """Return a matrix in MXFP8, scaled along its rows, scales rounded up so that no element overflows."""
    scales_TB, data_TI = to_mx(matrix_TI.contiguous(), LOW, MXFP8_BLOCK, ScaleCalculationMode.RCEIL)
    return BlockScaled(data_TI, scales_TB)


def block_scaled_matmul(left: BlockScaled, right: BlockScaled, dtype: torch.dtype, *, emulates: bool) -> Tensor:
    """Return left_TI x right_OI^T in `dtype`."""
    if emulates:
        wide_TI, wide_OI = (
            to_dtype(one.data_TI, one.scales_TB, LOW, MXFP8_BLOCK, torch.float32) for one in (left, right)
        )
        emulated: Tensor = wide_TI @ wide_OI.t()
        return emulated.to(dtype)
    product: Tensor = torch._scaled_mm(
        left.data_TI,
        right.data_TI.t(),
        scale_a=to_blocked(left.scales_TB),
        scale_b=to_blocked(right.scales_TB),
        out_dtype=torch.bfloat16,
    )
    return product.to(dtype)


class RowScaled(NamedTuple):
    """A tensor in 8 bits and what each row is multiplied with afterwards, in float32."""

    data: Tensor
    factors: Tensor


def to_row_scaled(tensor: Tensor) -> RowScaled:
    """Return a tensor with rows (its last dim) scaled by powers of two to the format's largest value."""
    largest = torch.finfo(LOW).max
    amax = torch.linalg.vector_norm(tensor, float("inf"), -1, keepdim=True)
    scale = amax_to_scale(amax, LOW, round_scales_to_power_of_2=True)
    data = (tensor.float() * scale).clamp(-largest, largest).to(LOW)
    return RowScaled(data, scale.reciprocal().squeeze(-1))


def row_scaled_grouped_matmul(rows: RowScaled, weights: RowScaled, counts_E: Tensor, *, emulates: bool) -> Tensor:
    """Return rows_TO in bfloat16 (emulated: float32): the first counts_E[0] of rows_TI times weights_EOI[0]^T, ..."""
    if emulates:
        wide_TI = rows.data.float() * rows.factors[..., None]
        wide_EOI = weights.data.float() * weights.factors[..., None]
        return grouped_matmul(wide_TI, wide_EOI, counts_E)
    product: Tensor = torch._scaled_grouped_mm(
        rows.data,
        weights.data.transpose(1, 2),
        rows.factors,
        weights.factors,
        counts_E.cumsum(0).to(torch.int32),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product
