"""Collectives on plain tensors that autograd and torch.compile see through.

Each forward has the backward that makes the pair a linear map and its transpose: gathering is undone by summing and
scattering, and the other way round. They are functional (no buffer is written in place), and those with a gradient wait
at once, so that nothing still under way leaves them: a compiled block fails on such a tensor in its backward, and
waiting by hand outside of autograd loses the gradient (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.parallelism.axis_mark import axis_mark

_ops = torch.ops._c10d_functional


def all_gather_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts joined along `dim`; no gradient."""
    return x if group.size() == 1 else start_all_gather(x, dim, group)()


def start_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to join the ranks' parts along `dim`; return what waits for the result and returns it, once. No gradient.

    Only for eager code, which keeps the result from compiled graphs until it has waited.
    """
    with axis_mark(group):
        pending = _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)

    def wait() -> Tensor:
        with axis_mark(group):
            gathered: Tensor = _ops.wait_tensor(pending)
        return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim=dim)

    return wait


def reduce_scatter_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks; no gradient."""
    if group.size() == 1:
        return x
    stacked = x if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))
    with axis_mark(group):
        scattered: Tensor = _ops.wait_tensor(
            _ops.reduce_scatter_tensor(stacked.contiguous(), "sum", group.size(), group.group_name)
        )
    return scattered


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks as a new tensor; no gradient."""
    if group.size() == 1:
        return x
    with axis_mark(group):
        total: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
    return total


def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the greatest over ranks as a new tensor; no gradient."""
    if group.size() == 1:
        return x
    with axis_mark(group):
        greatest: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group.group_name))
    return greatest


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts joined along `dim`; backward sums the gradient over ranks and keeps this rank's part."""
    gathered: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return gathered


def sum_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks; backward joins the ranks' gradients."""
    scattered: Tensor = _SumScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return scattered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_dim(gradient, ctx.dim, ctx.group), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(gradient, ctx.dim, ctx.group), None, None
