"""TokenExchange: rows of tokens travel to the ranks that hold their experts, and back (expert parallelism).

Nothing is padded and nothing dropped: each pair of ranks exchanges as many rows as the router says, none at all
included. Each rank of the group sends rows of its own tokens, so that the experts' gradients are sums over all of them.

Shapes: E experts, P ranks of the group, L = E / P experts on this rank, R rows here, Q rows that arrive, D dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.expert_rows import reorder
from meshwright.parallelism.axis_mark import axis_mark
from meshwright.parallelism.host_values import host_values

_ops = torch.ops._c10d_functional


class TokenExchange(nn.Module):
    """Takes the place of a mixture's `dispatch`: runs each row through its expert, wherever that is."""

    is_eager = True
    """The number of rows that arrive is known at run time only."""

    def __init__(self, group: dist.ProcessGroup, experts_per_token: int) -> None:
        super().__init__()
        self._group, self._experts_per_token = group, experts_per_token

    def forward(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return each row's output, in the rows' order; `counts_E` of them, in order, are for each expert."""
        counts_PL = exchange_counts(counts_E, self._group)
        # One wait for the device tells both how many rows leave for each rank and how many come from it.
        sizes_2P = torch.cat([counts_E.view_as(counts_PL).sum(1), counts_PL.sum(1)])
        kind = "rows sent to and received from each rank"
        # A token goes to each expert once at most.
        most = len(rows_RD) // self._experts_per_token * min(self._experts_per_token, counts_PL.shape[1])
        sizes = host_values(sizes_2P, kind, len(rows_RD), self._group.rank(), most)
        sent, received = sizes[: len(counts_PL)], sizes[len(counts_PL) :]
        arrived_QD = exchange_rows(rows_RD, sent, received, self._group)
        by_expert_Q = expert_order(counts_PL, sum(received))
        by_source_Q = by_expert_Q.argsort()
        done_QD = experts(reorder(arrived_QD, by_expert_Q, by_source_Q), counts_PL.sum(0))
        return exchange_rows(reorder(done_QD, by_source_Q, by_expert_Q), received, sent, self._group)


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return counts_PL: the rows that come from each rank for each expert of this one."""
    equal = [len(counts_E) // group.size()] * group.size()
    with axis_mark(group):
        arrived_E: Tensor = _ops.wait_tensor(_ops.all_to_all_single(counts_E, equal, equal, group.group_name))
    return arrived_E.view(group.size(), -1)


def expert_order(counts_PL: Tensor, num_rows: int) -> Tensor:
    """Return which of the rows, that arrive by source rank, comes where when they are ordered by expert."""
    num_sources, num_experts = counts_PL.shape
    experts_PL = torch.arange(num_experts, device=counts_PL.device).repeat(num_sources)
    return experts_PL.repeat_interleave(counts_PL.flatten(), output_size=num_rows).argsort(stable=True)


def exchange_rows(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that arrive, by source rank; the first sent[0] go to rank 0. Backward sends gradients back."""
    arrived_QD: Tensor = _ExchangeRows.apply(rows_RD, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived_QD


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(rows_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient_QD: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(gradient_QD, received, sent, ctx.group), None, None, None


def _all_to_all(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    with axis_mark(group):
        arriving = _ops.all_to_all_single(rows_RD.contiguous(), received, sent, group.group_name)
        arrived_QD: Tensor = _ops.wait_tensor(arriving)
    return arrived_QD
