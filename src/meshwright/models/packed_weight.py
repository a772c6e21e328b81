"""PackedWeight: a frozen weight in 8 or 4 bits, which a matmul reads in the format of its input (adapter.base_dtype).

64 elements along the inputs share a scale, their largest magnitude, so that no shard that holds whole blocks changes a
number. A scale is a bfloat16 that is not below it: FSDP2 casts floating-point parameters to precision.compute, and that
one is kept by each format. int8 is round(127 w / scale); nf4 is the nearest of 16 numbers, the quantiles of a normal
distribution (Dettmers et al., arXiv:2305.14314, appendix E), two in a byte. Scales are not quantised again.

Shapes: O outputs, I inputs, N = I / 64 blocks of a row.
"""

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.spec.step.adapter import PACKED_BLOCK, BaseDType

_STORED: Final = {"int8": torch.int8, "nf4": torch.uint8}
_LARGEST_INT8 = 127
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_ROUNDS_UP = 1 + 2.0**-8
"""Factor after which the nearest bfloat16 is not below what it was."""


class PlainWeight(NamedTuple):
    """A frozen weight as it is."""

    weight_OI: Tensor

    def times(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        return F.linear(x, self.weight_OI)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return W, [O, I]."""
        return self.weight_OI


class PackedWeight(NamedTuple):
    """A frozen weight in 8 or 4 bits; backward unpacks it again."""

    stored: Tensor
    """int8 [O, I], or uint8 [O, I / 2]: the first of two elements in the low half."""
    scale_ON: Tensor
    byte_values: Tensor | None = None
    """`nf4_byte_values`, in any floating-point dtype, on the device of `stored`; made in each use where it is None."""

    def times(self, x: Tensor) -> Tensor:
        """Return x W^T, with a gradient of x alone."""
        if torch.compiler.is_compiling():
            # torch keeps what a matmul of backward reads: the whole weight, were it not marked to be made again.
            whole = checkpoint(unpack, self.stored, self.scale_ON, x.dtype, self.byte_values, use_reentrant=False)
            return F.linear(x, whole)
        product: Tensor = _PackedMatmul.apply(x, *self)  # type: ignore[no-untyped-call]
        return product

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return W, [O, I], in `dtype`."""
        return unpack(self.stored, self.scale_ON, dtype, self.byte_values)


class _PackedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale_ON: Tensor, byte_values: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale_ON, byte_values)
        return F.linear(x, unpack(stored, scale_ON, x.dtype, byte_values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        stored, scale_ON, byte_values = ctx.saved_tensors
        return gradient @ unpack(stored, scale_ON, gradient.dtype, byte_values), None, None, None


def packed_shapes(base_dtype: BaseDType, outputs: int, inputs: int) -> tuple[tuple[int, int], torch.dtype, int]:
    """Return the shape and the dtype of what is stored of a weight, and the blocks of a row."""
    columns = inputs // 2 if base_dtype == "nf4" else inputs
    return (outputs, columns), _STORED[base_dtype], inputs // PACKED_BLOCK


def elements_of(stored: Tensor) -> int:
    """Return the elements that one of `stored` holds."""
    return 2 if stored.dtype is torch.uint8 else 1


def pack(weight_OI: Tensor, base_dtype: BaseDType) -> tuple[Tensor, Tensor]:
    """Return (what is stored, scale_ON) of a weight whose inputs are whole blocks."""
    blocks_ONB = weight_OI.unflatten(1, (-1, PACKED_BLOCK))
    largest_ON = blocks_ONB.abs().amax(-1).to(torch.float32)
    scale_ON = (largest_ON * _ROUNDS_UP).to(torch.bfloat16)
    # A block of zeros has no scale.
    divisor_ON = torch.where(scale_ON == 0, 1.0, scale_ON.to(torch.float32))
    shares_OI = (blocks_ONB / divisor_ON[..., None]).flatten(1)
    if base_dtype == "int8":
        return (shares_OI * _LARGEST_INT8).round().to(torch.int8), scale_ON
    table = torch.tensor(_NF4, dtype=shares_OI.dtype, device=weight_OI.device)
    code_OI = torch.bucketize(shares_OI, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return code_OI[:, ::2] | code_OI[:, 1::2] << 4, scale_ON


def nf4_byte_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two elements that each of the 256 values of a byte of nf4 holds, in units of their scale: [256, 2]."""
    table = torch.tensor(_NF4, dtype=dtype, device=device)
    return torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)


def unpack(stored: Tensor, scale_ON: Tensor, dtype: torch.dtype, byte_values: Tensor | None = None) -> Tensor:
    """Return the weight, [O, I], in `dtype`; `byte_values` as PackedWeight has them."""
    if stored.dtype is torch.int8:
        # One pass: a kernel reads int8 and writes `dtype`.
        scales_ON, blocks_ONB = scale_ON.to(dtype) * (1 / _LARGEST_INT8), stored.unflatten(1, (-1, PACKED_BLOCK))
    else:
        scales_ON = scale_ON.to(dtype)
        byte_values = nf4_byte_values(dtype, stored.device) if byte_values is None else byte_values.to(dtype)
        blocks_ONB = byte_values[stored.int()].flatten(1).unflatten(1, (-1, PACKED_BLOCK))
    weight_OI: Tensor = (blocks_ONB * scales_ON[..., None]).flatten(1)
    return weight_OI
