"""Stochastic rounding of optimizer states to bfloat16.

A float32 value becomes one of the two bfloat16 neighbours, the upper with the probability that makes the mean exact.
Nearest rounding would lose small changes: bfloat16 has 8 significant bits, and a second moment with a decay rate of
0.999 changes by less than half of the last one, so that it never falls.

The random bits are a hash of (parameter name, step, element index), as those of initial weights are
(models/initial.py): replicas of a parameter round alike, and neither the layout nor a resume changes the result. The
hash is murmur3's finalizer (Appleby 2011) in wrapping int32 arithmetic; its halves round the two moments.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW_BITS = 0xFFFF
_HIGH_BITS = -(1 << 16)


def name_key(name: str) -> int:
    """Return an int32 that depends on a parameter's name."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"))


def random_bits(
    key: int, step: Tensor, shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Return 32 random bits for each element of the box at `offsets` of a tensor of `shape`, flat, int32.

    `step` is a tensor without dims on the device of the result.
    """
    bits = _element_index(shape, local_shape, offsets, step.device)
    bits.mul_(_signed(0x9E3779B1)).add_(key).add_(step.to(torch.int32) * _signed(0x85EBCA77))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        # The shift of int32 copies the sign; the mask makes it a logical one.
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            bits.mul_(_signed(factor))
    return bits


def lower_half(bits: Tensor) -> Tensor:
    """Return the lower 16 bits of each number."""
    return bits & _LOW_BITS


def upper_half(bits: Tensor) -> Tensor:
    """Return the upper 16 bits of each number."""
    return (bits >> 16).bitwise_and_(_LOW_BITS)


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Return `values`, float32 or wider and finite, in bfloat16; `noise` has 16 random bits for each, int32."""
    # What is added to the bits that are cut off carries into the kept ones as often as their value says.
    bits = values.float().view(torch.int32).add(noise).bitwise_and_(_HIGH_BITS)
    return bits.view(torch.float32).bfloat16()


def _element_index(
    shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int], device: torch.device
) -> Tensor:
    """Return the index of each element of a box in the whole tensor, modulo 2**32, flat."""
    index = torch.zeros((), dtype=torch.int32, device=device)
    for dim, (size, offset) in enumerate(zip(local_shape, offsets, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        along = torch.arange(size, dtype=torch.int32, device=device) * _signed(stride) + _signed(offset * stride)
        index = index.unsqueeze(-1) + along
    return index.flatten()


def _signed(value: int) -> int:
    """Return the int32 of the same lower 32 bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
