"""torch.distributed's calls for one flat tensor, by whichever name this torch has, and the pair that autograd needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

# Renamed in 2.13, where the old names warn.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_sequence(x_BSD: Tensor) -> Tensor:
    """Return the ranks' parts joined along dim 1; backward sums and scatters."""
    gathered: Tensor = _Gather.apply(x_BSD)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sequence(x_BSD: Tensor) -> Tensor:
    """Return this rank's part along dim 1 of the sum over ranks; backward gathers."""
    part: Tensor = _Scatter.apply(x_BSD)  # type: ignore[no-untyped-call]
    return part


def exchange(x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """Return the rows that arrive, of `x` whose first sent[0] rows go to rank 0; backward sends gradients back."""
    arrived: Tensor = _Exchange.apply(x, received, sent)  # type: ignore[no-untyped-call]
    return arrived


def _gathered(x: Tensor) -> Tensor:
    num_ranks = dist.get_world_size()
    stacked = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    all_gather_into(stacked, x.contiguous())
    return torch.cat(stacked.chunk(num_ranks), dim=1)


def _scattered(x: Tensor) -> Tensor:
    num_ranks = dist.get_world_size()
    part = x.new_empty(x.shape[0], x.shape[1] // num_ranks, *x.shape[2:])
    reduce_scatter_into(part, torch.cat(x.chunk(num_ranks, dim=1)))
    return part


def _exchanged(x: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:
    arrived = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent)
    return arrived


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _scattered(gradient)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _gathered(gradient)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.sizes = (sent, received)
        return _exchanged(x, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(gradient, *ctx.sizes), None, None
