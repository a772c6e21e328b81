"""Expert-parallel token exchange: all-to-alls send tokens to the ranks of their experts, and back.

Nothing is padded or dropped: each pair of ranks exchanges exactly the routed rows, possibly none. Each rank sends its
own tokens, so the experts' gradients sum over all tokens of the group.

Shapes: E experts, P ranks of the group, L = E / P experts on this rank, R rows here, Q rows received, D dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.expert_rows import reorder
from meshwright.parallelism.host_sync import read_on_host
from meshwright.parallelism.profiler_range import profiler_range

_ops = torch.ops._c10d_functional


class TokenExchange(nn.Module):
    """Replacement of a mixture's `dispatch` for experts on several ranks."""

    is_eager = True
    """The number of received rows is known at run time only, so torch.compile cannot trace it."""

    def __init__(self, group: dist.ProcessGroup, experts_per_token: int) -> None:
        super().__init__()
        self._group, self._experts_per_token = group, experts_per_token

    def forward(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return each row's output, in order; rows are sorted by expert, `counts_E` for each."""
        counts_PL = exchange_counts(counts_E, self._group)
        # One device-to-host sync for both the sent and the received sizes.
        sizes_2P = torch.cat([counts_E.view_as(counts_PL).sum(1), counts_PL.sum(1)])
        kind = "rows sent to and received from each rank"
        # A token goes to each expert at most once.
        most = len(rows_RD) // self._experts_per_token * min(self._experts_per_token, counts_PL.shape[1])
        sizes = read_on_host(sizes_2P, kind, len(rows_RD), self._group.rank(), most)
        sent, received = sizes[: len(counts_PL)], sizes[len(counts_PL) :]
        arrived_QD = exchange_rows(rows_RD, sent, received, self._group)
        by_expert_Q = expert_order(counts_PL, sum(received))
        by_source_Q = by_expert_Q.argsort()
        done_QD = experts(reorder(arrived_QD, by_expert_Q, by_source_Q), counts_PL.sum(0))
        return exchange_rows(reorder(done_QD, by_source_Q, by_expert_Q), received, sent, self._group)


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return counts_PL: the rows from each rank for each expert of this rank."""
    equal = [len(counts_E) // group.size()] * group.size()
    with profiler_range(group):
        arrived_E: Tensor = _ops.wait_tensor(_ops.all_to_all_single(counts_E, equal, equal, group.group_name))
    return arrived_E.view(group.size(), -1)


def expert_order(counts_PL: Tensor, num_rows: int) -> Tensor:
    """Return the permutation that sorts rows received by source rank by expert."""
    num_sources, num_experts = counts_PL.shape
    experts_PL = torch.arange(num_experts, device=counts_PL.device).repeat(num_sources)
    return experts_PL.repeat_interleave(counts_PL.flatten(), output_size=num_rows).argsort(stable=True)


def exchange_rows(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the received rows by source rank; the first sent[0] go to rank 0. Backward is the reverse exchange."""
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
    with profiler_range(group):
        arriving = _ops.all_to_all_single(rows_RD.contiguous(), received, sent, group.group_name)
        arrived_QD: Tensor = _ops.wait_tensor(arriving)
    return arrived_QD
