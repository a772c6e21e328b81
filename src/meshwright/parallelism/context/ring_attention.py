"""Ring attention: keys and values are passed around the context-parallel ranks; none holds the whole sequence.

At each step a rank attends to the keys that it holds while it sends them to the next rank. Chunks that the causal mask
hides completely are skipped; with zigzag shards that is the same half of the work on each rank.

Attention to a part of the keys is a softmax of its own, with the logsumexp of its scores. Two parts merge by weighing
each with its share of the exponentials. The gradients of one part need only the logsumexp of the whole.

Shapes: B batch, S positions of each rank, T = P S of the whole sequence, P ranks, N query heads, K key/value heads,
H width of a query or key head, W of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.errors import UnsupportedError
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.parallelism.collectives import all_gather_dim, profiler_range
from meshwright.parallelism.context.blockwise_attention import blockwise_attention, blockwise_attention_backward
from meshwright.parallelism.torch_private.torch_attention import (
    Attended,
    Heads,
    flash_attention,
    flash_attention_backward,
    has_flash_kernel,
)
from meshwright.parallelism.torch_private.torch_checkpoint import saved_as_unit

_NO_RING = 'is not computed by a ring: set layout.cp_method to "all-gather" or "ulysses"'


class RingAttention(CausalAttention):
    """CausalAttention of a sequence in zigzag shards, by ring exchange over `group`."""

    is_eager = True
    """torch.compile cannot trace P2P that overlaps with computation."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None = None, window: int | None = None) -> None:
        if window is not None:
            raise UnsupportedError(f"attention within a window of {window} positions {_NO_RING}")
        super().__init__(scale)
        self.group = group

    def forward(
        self,
        query_BSNH: Tensor,
        key_BSKH: Tensor,
        value_BSKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attended_BSNW; all arguments are this rank's shard."""
        if sinks_N is not None:
            raise UnsupportedError(f"attention with sinks {_NO_RING}")
        # All-gathered, since documents are a few bytes per position.
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
        for queries, _, part in pairs:
            merge_into((attended_BSNW[:, queries], logsumexp_BSN[:, queries]), part.attend())
        return attended_BSNW.to(query_BSNH.dtype), logsumexp_BSN

    def pairs(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BT: Tensor | None
    ) -> Iterator[tuple[slice, slice, PartialAttention]]:
        """Yield the queries, the keys and their attention at each step, this rank's keys first; exchange keys."""
        rank, degree = self.group.rank(), self.group.size()
        scale = 1 / math.sqrt(query_BSNH.shape[-1]) if self.scale is None else self.scale
        held = [key_BSKH.contiguous(), value_BSKW.contiguous()]
        for step in range(degree):
            passing = RingExchange(held, self.group) if step < degree - 1 else None
            source = (rank - step) % degree
            queries, keys = _visible(rank, source, query_BSNH.shape[1])
            documents = None
            if documents_BT is not None:
                by_rank = documents_BT.chunk(degree, dim=1)
                documents = (by_rank[rank][:, queries], by_rank[source][:, keys])
            heads = (query_BSNH[:, queries], held[0][:, keys], held[1][:, keys])
            yield queries, keys, PartialAttention(heads, scale, source == rank, documents)
            held = held if passing is None else passing.wait()


class RingExchange:
    """Asynchronous send of tensors to the next rank of `group` and receive of the same shapes from the previous."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._sent = tensors  # must stay alive until sent
        self._received = [torch.empty_like(tensor) for tensor in tensors]
        # group_peer: the positional peer is a global rank.
        to, source = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=source) for tensor in self._received]
        with profiler_range(group):
            self._works = dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> list[Tensor]:
        """Wait for the exchange and return the received tensors."""
        for work in self._works:
            work.wait()
        return self._received


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
        # Saved: recomputation would repeat the ring exchange with no attention to hide it.
        attended_BSNW, logsumexp_BSN = saved_as_unit(lambda: ring.attend(*inputs, documents_BT))
        ctx.save_for_backward(query_BSNH, key_BSKH, value_BSKW, documents_BT, attended_BSNW, logsumexp_BSN)
        return attended_BSNW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BSNW: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, documents_BT, attended_BSNW, logsumexp_BSN = ctx.saved_tensors
        query_gradient, *sums = (_new_float32(x).zero_() for x in inputs)
        following: RingExchange | None = None
        for queries, keys, part in ctx.ring.pairs(*inputs, documents_BT):
            whole = (attended_BSNW[:, queries], logsumexp_BSN[:, queries])
            of_query, of_key, of_value = part.backward(gradient_BSNW[:, queries], whole)
            # Not +=, which would copy the slice onto itself.
            query_gradient[:, queries].add_(of_query)
            # The gradients of keys and values follow them around the ring, one step behind.
            sums = sums if following is None else following.wait()
            sums[0][:, keys].add_(of_key)
            sums[1][:, keys].add_(of_value)
            following = RingExchange(sums, ctx.ring.group)
        assert following is not None, "a ring has one rank at least"
        gradients = (query_gradient, *following.wait())
        return *(gradient.to(x.dtype) for gradient, x in zip(gradients, inputs, strict=True)), None, None


def _new_float32(x: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor of the shape of `x`, in float32 or wider."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _visible(rank: int, source: int, num_positions: int) -> tuple[slice, slice]:
    """Return the queries of `rank` that see keys of `source`, and these keys; causal for source = rank, else in full.

    In the sequence, the first chunk of an earlier rank precedes both chunks of `rank` and its second follows both;
    both chunks of a later rank lie between the two of `rank`.
    """
    first, second, both = slice(0, num_positions // 2), slice(num_positions // 2, None), slice(0, None)
    if source == rank:
        return both, both
    return (both, first) if source < rank else (second, both)


@dataclass(frozen=True)
class PartialAttention:
    """Attention of queries to some keys, optionally causal and within documents."""

    heads: Heads
    scale: float
    is_causal: bool
    documents: tuple[Tensor, Tensor] | None = None
    """documents_BS of the queries and documents_BT of the keys."""

    def attend(self) -> Attended:
        """Return attended_BSNW and logsumexp_BSN; 0 and minus infinity for a query that sees no key."""
        if self._has_kernel:
            return flash_attention(self.heads, self.is_causal, self.scale)
        return blockwise_attention(self.heads, self.documents, self.is_causal, self.scale)

    def backward(self, gradient_BSNW: Tensor, whole: Attended) -> Heads:
        """Return this part's gradients of query, key and value; `whole` is the attention to all keys."""
        if self._has_kernel:
            return flash_attention_backward(gradient_BSNW, self.heads, whole, self.is_causal, self.scale)
        return blockwise_attention_backward(
            gradient_BSNW, self.heads, whole, self.documents, self.is_causal, self.scale
        )

    @property
    def _has_kernel(self) -> bool:
        return self.documents is None and has_flash_kernel(self.heads, self.is_causal)


def merge_into(whole: Attended, part: Attended) -> None:
    """Merge `part`, attention of the same queries to other keys, into `whole` in place.

    `whole` is in float32 at least. Each of its queries has seen a key; those of `part` may have seen none.
    """
    attended_BSNW, logsumexp_BSN = whole
    both_BSN = torch.logaddexp(logsumexp_BSN, part[1])
    of_whole_BSN1, of_part_BSN1 = ((of_one_BSN - both_BSN).exp()[..., None] for of_one_BSN in (logsumexp_BSN, part[1]))
    attended_BSNW.mul_(of_whole_BSN1).addcmul_(part[0], of_part_BSN1)
    logsumexp_BSN.copy_(both_BSN)
