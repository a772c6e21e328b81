"""Context parallelism in a ring: keys and values travel round the ranks; none ever holds those of the whole sequence.

At each step a rank attends to the keys it holds just then, while they are already on their way to the next rank. What
causality hides between whole chunks is never computed; with zigzag parts, that is the same half of the work on each.

Shapes: B batch, S positions of each rank, T = P S of the whole sequence, P ranks, N query heads, K key/value heads,
H width of a query or key head, W of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.models.attention import CausalAttention
from meshwright.parallelism.axis_mark import axis_mark
from meshwright.parallelism.collectives import all_gather_dim
from meshwright.parallelism.context.partial_attention import Pair, merge_into
from meshwright.parallelism.torch_private.torch_checkpoint import kept_whole


class RingAttention(CausalAttention):
    """CausalAttention of a sequence in zigzag parts, whose keys the ranks of `group` pass on to each other."""

    is_eager = True
    """Sends and receives between ranks that overlap with computing are nothing that torch.compile sees through."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None = None) -> None:
        super().__init__(scale)
        self.group = group

    def forward(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return attended_BSNW; all arguments are this rank's part."""
        # Documents are a few bytes a position: all ranks know all of them.
        documents_BT = None if documents_BS is None else all_gather_dim(documents_BS, 1, self.group)
        attended_BSNW: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
            query_BSNH, key_BSKH, value_BSKW, documents_BT, self
        )
        return attended_BSNW

    def attend(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return attended_BSNW and logsumexp_BSN, without a graph for backward."""
        pairs = self.pairs(query_BSNH, key_BSKH, value_BSKW, documents_BT)
        _, _, own = next(pairs)
        attended_BSNW, logsumexp_BSN = (_new_float32(x).copy_(x) for x in own.attend())
        for queries, _, pair in pairs:
            merge_into((attended_BSNW[:, queries], logsumexp_BSN[:, queries]), pair.attend())
        return attended_BSNW.to(query_BSNH.dtype), logsumexp_BSN

    def pairs(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BT: Tensor | None
    ) -> Iterator[tuple[slice, slice, Pair]]:
        """Yield which queries meet which of the keys held at each step, own ones first; passes keys on meanwhile."""
        rank, degree = self.group.rank(), self.group.size()
        scale = 1 / math.sqrt(query_BSNH.shape[-1]) if self.scale is None else self.scale
        held = [key_BSKH.contiguous(), value_BSKW.contiguous()]
        for step in range(degree):
            passing = Passing(held, self.group) if step < degree - 1 else None
            source = (rank - step) % degree
            queries, keys = _visible(rank, source, query_BSNH.shape[1])
            documents = None
            if documents_BT is not None:
                by_rank = documents_BT.chunk(degree, dim=1)
                documents = (by_rank[rank][:, queries], by_rank[source][:, keys])
            heads = (query_BSNH[:, queries], held[0][:, keys], held[1][:, keys])
            yield queries, keys, Pair(heads, scale, source == rank, documents)
            held = held if passing is None else passing.arrived()


class Passing:
    """Tensors on their way to the next rank of `group`, while others of their shapes come from the one before."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._leaving = tensors  # nobody else may keep them until they have left
        self._arriving = [torch.empty_like(tensor) for tensor in tensors]
        # Ranks within the group: those that P2POp takes by position are ranks of the world.
        to, source = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=source) for tensor in self._arriving]
        with axis_mark(group):
            self._works = dist.batch_isend_irecv([*sends, *receives])

    def arrived(self) -> list[Tensor]:
        """Return what has come, after waiting for it."""
        for work in self._works:
            work.wait()
        return self._arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BSNH: Tensor,
        key_BSKH: Tensor,
        value_BSKW: Tensor,
        documents_BT: Tensor | None,
        ring: RingAttention,
    ) -> Tensor:
        ctx.ring = ring
        inputs = (query_BSNH, key_BSKH, value_BSKW)
        # Else recomputation would pass all keys on once more, with no attention left to hide behind.
        attended_BSNW, logsumexp_BSN = kept_whole(lambda: ring.attend(*inputs, documents_BT))
        ctx.save_for_backward(query_BSNH, key_BSKH, value_BSKW, documents_BT, attended_BSNW, logsumexp_BSN)
        return attended_BSNW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BSNW: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, documents_BT, attended_BSNW, logsumexp_BSN = ctx.saved_tensors
        query_gradient, *sums = (_new_float32(x).zero_() for x in inputs)
        following: Passing | None = None
        for queries, keys, pair in ctx.ring.pairs(*inputs, documents_BT):
            whole = (attended_BSNW[:, queries], logsumexp_BSN[:, queries])
            of_query, of_key, of_value = pair.backward(gradient_BSNW[:, queries], whole)
            # Not +=, which would copy the slice onto itself once more.
            query_gradient[:, queries].add_(of_query)
            # The gradients of keys and values follow them round, one step behind, and come home after the last.
            sums = sums if following is None else following.arrived()
            sums[0][:, keys].add_(of_key)
            sums[1][:, keys].add_(of_value)
            following = Passing(sums, ctx.ring.group)
        assert following is not None, "a ring has one rank at least"
        gradients = (query_gradient, *following.arrived())
        return *(gradient.to(x.dtype) for gradient, x in zip(gradients, inputs, strict=True)), None, None


def _new_float32(x: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor of the shape of `x`, in float32 or wider."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _visible(rank: int, source: int, num_positions: int) -> tuple[slice, slice]:
    """Return which queries of `rank` see which keys of `source`; one's own causally, others' all of these.

    The first chunk of an earlier rank comes before both of ours, its second after both; of a later rank both chunks lie
    between our two.
    """
    first, second, both = slice(0, num_positions // 2), slice(num_positions // 2, None), slice(0, None)
    if source == rank:
        return both, both
    return (both, first) if source < rank else (second, both)
