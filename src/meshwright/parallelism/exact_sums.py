"""Sums that do not depend on their order: of gradients and losses over microbatches and ranks, and of squares.

A sum of floating-point numbers depends on the order of its terms, and so on the number of ranks. Float64 adds multiples
of one power of two without rounding while the sum is below 2**53 of them. So each term is rounded to such a multiple
first, on its own, and whatever adds up float64 afterwards, in whatever order (a collective, FSDP2, autograd), returns
the same bits. An integer would need as many bytes; float64 passes through the reductions that there are.

The norm of gradients is a sum over elements, which layouts shard differently: of integers, two digits of each square.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_fsdp import change_gradients

_SIGNIFICANT_BITS = 53
"""Of float64."""
GRADIENT_LIMIT_BITS = 13
"""A gradient of a microbatch is below 2**13 = 8192; then the mean is known to 2**-40, 1e-12, or 2**-39."""
LOSS_LIMIT_BITS = 24
"""A loss of a microbatch is below 2**24 = 1.7e7; then the mean is known to 2**-29, 2e-9, or 2**-28."""


@dataclass(frozen=True)
class FixedPoint:
    """Multiples of 2**unit_bits below 2**limit_bits in magnitude; what is larger becomes infinite."""

    unit_bits: int
    limit_bits: int

    @classmethod
    def of_terms(cls, num_terms: int, limit_bits: int) -> Self:
        """Return the finest numbers below 2**limit_bits of which float64 adds `num_terms` exactly."""
        return cls((num_terms - 1).bit_length() + limit_bits - _SIGNIFICANT_BITS, limit_bits)

    def round_(self, tensors: list[Tensor]) -> None:
        """Round each element to the nearest multiple, in place; all in one format with float32's exponents or more.

        Scaling by a power of two is exact. A number beyond the limit overflows in the first scaling, and infinity
        reaches every sum that it is part of: no check of its own, and no synchronization with a device.
        """
        up = round(math.log2(torch.finfo(tensors[0].dtype).max)) - self.limit_bits
        torch._foreach_mul_(tensors, 2.0**up)
        torch._foreach_mul_(tensors, 2.0 ** (-up - self.unit_bits))
        torch._foreach_round_(tensors)
        torch._foreach_mul_(tensors, 2.0**self.unit_bits)


def sum_exactly(stages: Stages, num_gradients: int, num_losses: int) -> None:
    """Round what `stages` add up, of so many backwards and forwards on all ranks, at most.

    They must be sharded by FSDP2 with reductions in float64.
    """
    stages.loss_format = FixedPoint.of_terms(num_losses, LOSS_LIMIT_BITS)
    for stage in stages:
        assert isinstance(stage, FSDPModule)
        change_gradients(stage, FixedPoint.of_terms(num_gradients, GRADIENT_LIMIT_BITS).round_)


_DIGIT_BITS = 30
_WORD_BITS, _NUM_WORDS = 12, 6
"""Of a sum of digits in an all-reduce. Float64 holds the sums of words of 4,096 tensors and 16,384 ranks exactly."""


def norm_of(gradients: Sequence[tuple[Tensor, int]], num_copies: int, device: torch.device) -> float:
    """Return the 2-norm of all elements on all ranks, the same bits for any sharding; a collective on `device`.

    Each tensor has a weight; those of an element's copies on all ranks add up to `num_copies`. Infinite where an
    element is not finite. Of N elements the square's relative error is below N x 2**-58.
    """
    held = [(gradient, weight) for gradient, weight in gradients if gradient.numel() and weight]
    largest = _largest([gradient for gradient, _ in held], device)
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    words = torch.zeros(2, _NUM_WORDS, dtype=torch.int64, device=device)
    if held:
        digits = torch.stack([digits_of_squares(gradient, exponent).to(device) for gradient, _ in held])
        weights = torch.tensor([weight for _, weight in held], device=device)
        shifts = torch.arange(_NUM_WORDS, device=device) * _WORD_BITS
        words += ((digits[..., None] >> shifts & (1 << _WORD_BITS) - 1) * weights[:, None, None]).sum(0)
    if dist.get_world_size() > 1:
        dist.all_reduce(words)
    # As floats, which a tracer knows how to read.
    high, low = (
        sum(int(word) << index * _WORD_BITS for index, word in enumerate(row)) for row in words.double().tolist()
    )
    return math.ldexp(math.sqrt(((high << _DIGIT_BITS) + low) // num_copies), exponent - _DIGIT_BITS)


def _largest(tensors: Sequence[Tensor], device: torch.device) -> float:
    """Return the largest magnitude on any rank, infinity for NaN; a collective."""
    own = [torch.linalg.vector_norm(tensor, math.inf).to(device, torch.float64) for tensor in tensors]
    none = torch.zeros((), dtype=torch.float64, device=device)
    # What the maximum of a NaN and a number is depends on their order.
    largest = torch.stack([none, *own]).amax().nan_to_num(nan=math.inf, posinf=math.inf)
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def digits_of_squares(gradient: Tensor, exponent: int) -> Tensor:
    """Return the sums of the first and of the second digit of (gradient / 2**exponent)**2, which is below 1."""
    # The square of a float32 is exact in float64, and so are all that follow.
    rest = gradient.double().mul_(2.0 ** (_DIGIT_BITS // 2 - exponent)).square_()
    high = rest.floor()
    low = rest.sub_(high).mul_(2.0**_DIGIT_BITS).floor_()
    return torch.stack([high.long().sum(), low.long().sum()])
