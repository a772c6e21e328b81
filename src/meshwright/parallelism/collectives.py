"""Functional collectives on plain tensors, for eager code, autograd and torch.compile.

The backward of an all-gather is a reduce-scatter, and the other way round. Collectives with a gradient wait at once, so
that no pending tensor leaves them: a compiled block fails on one in its backward, and waiting for it outside of
autograd loses the gradient (torch 2.13).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.profiler import record_function

from meshwright.spec.trace.timeline import AXIS_MARK

_ops = torch.ops._c10d_functional


def of_all_ranks(own: Tensor) -> Tensor:
    """Return this tensor of every rank, along a new first dim; a collective of all ranks, for small tensors."""
    # all_gather_into_tensor warns from 2.13 on, and its successor is not in 2.11.
    tensors = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, own.contiguous())
    return torch.stack(tensors)


def all_gather_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`; no gradient."""
    return x if group.size() == 1 else start_all_gather(x, dim, group)()


def start_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-gather along `dim` and return a function that waits for its result, to be called once. No gradient.

    Eager code only: a compiled graph must not see the pending tensor.
    """
    with profiler_range(group):
        pending = _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)

    def wait() -> Tensor:
        with profiler_range(group):
            gathered: Tensor = _ops.wait_tensor(pending)
        return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim=dim)

    return wait


def reduce_scatter_dim(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard along `dim` of the sum over ranks; no gradient."""
    if group.size() == 1:
        return x
    stacked = x if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))
    with profiler_range(group):
        scattered: Tensor = _ops.wait_tensor(
            _ops.reduce_scatter_tensor(stacked.contiguous(), "sum", group.size(), group.group_name)
        )
    return scattered


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks as a new tensor; no gradient."""
    return _all_reduce(x, "sum", group)


def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the maximum over ranks as a new tensor; no gradient."""
    return _all_reduce(x, "max", group)


def _all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    with profiler_range(group):
        reduced: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.group_name))
    return reduced


def all_to_all_rows(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the received rows by source rank; the first sent[0] go to rank 0. No gradient."""
    with profiler_range(group):
        arriving = _ops.all_to_all_single(rows_RD.contiguous(), received, sent, group.group_name)
        arrived_QD: Tensor = _ops.wait_tensor(arriving)
    return arrived_QD


def all_gather_autograd(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`; backward reduce-scatters the gradient."""
    gathered: Tensor = _AllGather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter_autograd(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard along `dim` of the sum over ranks; backward all-gathers the gradient."""
    scattered: Tensor = _ReduceScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return scattered


def exchange_rows(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the received rows, as `all_to_all_rows`; backward is the reverse exchange."""
    arrived_QD: Tensor = _ExchangeRows.apply(rows_RD, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived_QD


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_dim(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(gradient, ctx.dim, ctx.group), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return all_to_all_rows(rows_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient_QD: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return all_to_all_rows(gradient_QD, received, sent, ctx.group), None, None, None


def profiler_range(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a profiler range named after `group`; a null context without a profiler and in compiled code."""
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return record_function(f"{AXIS_MARK}{group.group_desc}")
