"""ContextAttention: what attention of a sequence that cp ranks share computes besides the causal whole of it.

For stacks that make it of torch's own operators (Stack.plain_context_attention). P ranks hold two chunks each, S
positions; T = P S; the elements of a rank's queries, keys and values are those of S positions.

    ring        P pieces, each with keys of S / 2 positions: kernels reach the rate of a context that is P times
                shorter. Each piece is merged into a float32 sum by the logsumexps (a: bytes of an activation):
                    forward    4 + a for the own piece, 16 + a + 68 / head width for each other one; 4 + a at the end
                    backward   8 + a for each piece into the gradients of queries, of half of the keys and values (own:
                               all); 4 to zero them, 4 + a at the end
                These are the bytes of a query's element on the last rank, whose queries see all other ranks' keys: the
                others, which merge as little as half of theirs, wait for it.
                Of documents, and in 32 bits on an accelerator, no kernel takes a piece (blockwise_attention.py): they
                are in float32, other ranks' as large as the first rank's, half of whose queries see all their keys
    all-gather  keys and values of T positions are joined and put in order, their gradients added up and put back; its
                mask is priced in attention_mask.py

Counted in parallelism/context/ring_attention.py and all_gather_attention.py, and in their traces of
2026-11-23.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.achieved_rates import is_blackwell, num_sms
from meshwright.cost.compute.blockwise_attention import BlockwiseAttention, Passes
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import CONTEXT_METHODS
from meshwright.cost.training_setup import Configurations, Floats, TrainingSetup
from meshwright.cost.work import BlockTable

Index = NDArray[np.int64]

_WIDE = 4.0
"""Bytes of an element in float32."""
_LOGSUMEXP_BYTES = 68.0
"""Of a query of one head: logaddexp (12), two differences (24), exponentials (16), read as weights (8), a copy (8)."""
_KERNELS_OF_MERGE = (8.0, 4.0)
"""Of one piece, forward (6 of logsumexps, 2 of the sum) and backward (3 gradients, a contiguous logsumexp)."""
_KERNELS_OF_ENDS = (3.0, 6.0)
"""Of the float32 sums: made of the own piece or of zeros, and cast."""
_GATHERED_PASSES = {"eager": (4.0, 13.0), "compiled": (4.0, 5.0)}
"""Times that gathered keys and values are read or written, forward and backward: joined and put in order (4);
gradients of two chunks added up (3) and put back (2), in eager code padded before (4) and copied each time (4)."""
_CHUNK_KERNELS = 4.0
"""A compiled concatenation has a kernel for each of the 2 P chunks of keys, and of values."""


@dataclass(frozen=True)
class ContextAttention:
    """One element a configuration."""

    blocks: BlockTable
    cp: Floats
    microbatch_size: Floats
    is_ring: NDArray[np.bool_]
    gathers_keys: NDArray[np.bool_]
    is_compiled: NDArray[np.bool_]
    element_bytes: Floats
    by_rows: NDArray[np.bool_]
    """Whether the pieces of a ring have no kernel."""
    num_sms: Floats
    is_new: NDArray[np.bool_]
    """Whether small tiles are less efficient."""

    def slowdown(self, row: Index, c: Constants) -> Floats:
        """Return the time of attention kernels over that of the rank's share of the causal whole."""
        context, ramp = self.blocks.context[row], c["attention_ramp_tokens"]
        pieces = (1 + ramp * self.cp / context) / (1 + ramp / context)
        return np.where(self.is_ring, pieces, 1.0)

    def rows_s(self, row: Index, matmul_rate: Floats, memory_rate: Floats, c: Constants) -> tuple[Passes, Passes]:
        """Return the seconds of pieces by rows, each forward and backward: of matrix products, and of the rest."""
        own, other = self._rows(row, 1.0), self._rows(row, 0.5)
        small_tile = np.where(self.is_new, c["small_tile.blackwell"], 1.0)
        rates = matmul_rate, memory_rate, self.num_sms, small_tile
        products, more = own.products_s(*rates), other.products_s(*rates)
        passes, others = own.passes_s(memory_rate, c["kernel_s"]), other.passes_s(memory_rate, c["kernel_s"])
        return _times(products, more, self.cp - 1), _times(passes, others, self.cp - 1)

    def _rows(self, row: Index, share: float) -> BlockwiseAttention:
        """Return the attention of a `share` of the rank's queries to as many keys as it has of all."""
        blocks = self.blocks
        tokens, width = blocks.tokens[row], np.maximum(blocks.head_width[row], 1.0)
        positions = tokens / self.microbatch_size
        return BlockwiseAttention(
            sequences=self.microbatch_size,
            queries=positions * share,
            keys=positions,
            heads=blocks.attention_flops[row] / (4 * blocks.context[row] * tokens * width),
            kv_heads=blocks.kv_elements[row] / (2 * tokens * width),
            width=width,
        )

    def kernels(self) -> tuple[Floats, Floats]:
        """Return the kernels that a block has more, forward and backward."""
        merges, ends, cp = _KERNELS_OF_MERGE, _KERNELS_OF_ENDS, self.cp
        chunks = _CHUNK_KERNELS * cp * (self.gathers_keys & self.is_compiled)
        ring = (cp - 1) * merges[0] + ends[0], cp * merges[1] + ends[1]
        return ring[0] * self.is_ring + chunks, ring[1] * self.is_ring + chunks

    def moved_bytes(self, row: Index) -> tuple[Floats, Floats]:
        """Return the bytes that one block reads and writes besides, forward and backward."""
        (ring_f, ring_b), (gather_f, gather_b) = self._ring_bytes(row), self._gathered_bytes(row)
        return (
            ring_f * self.is_ring + gather_f * self.gathers_keys,
            ring_b * self.is_ring + gather_b * self.gathers_keys,
        )

    def _ring_bytes(self, row: Index) -> tuple[Floats, Floats]:
        blocks, cp, cast = self.blocks, self.cp, _WIDE + self.element_bytes
        piece = _WIDE + np.where(self.by_rows, _WIDE, self.element_bytes)
        # Heads x their width, which is not the residual stream's in every model.
        queries = blocks.attention_flops[row] / (4 * blocks.context[row])
        keys, heads = blocks.kv_elements[row], queries / np.maximum(blocks.head_width[row], 1.0)
        merged = queries * (3 * _WIDE + piece) + heads * _LOGSUMEXP_BYTES
        gradients = (_WIDE + piece) * (cp * queries + (cp + 1) / 2 * keys)
        return (piece + cast) * queries + (cp - 1) * merged, gradients + (_WIDE + cast) * (queries + keys)

    def _gathered_bytes(self, row: Index) -> tuple[Floats, Floats]:
        gathered = self.blocks.kv_elements[row] * self.cp * self.element_bytes

        def by_kernels(eager: float, compiled: float) -> Floats:
            return np.where(self.is_compiled, compiled, eager)

        forward, backward = (
            by_kernels(*passes) for passes in zip(_GATHERED_PASSES["eager"], _GATHERED_PASSES["compiled"], strict=True)
        )
        return gathered * forward, gathered * backward


def _times(first: Passes, others: Passes, count: Floats) -> Passes:
    """Return the first and `count` of the others together."""
    return first[0] + count * others[0], first[1] + count * others[1]


def _has_no_kernel(setup: TrainingSetup) -> bool:
    """Return whether torch has no kernel for the pieces of a ring, as parallelism/torch_private/torch_attention.py
    says.
    """
    return setup.masks_scores or setup.lacks_flash_attention


def context_attention_of(configs: Configurations, blocks: BlockTable) -> ContextAttention:
    """Return what the configurations' attention computes besides."""
    layouts = configs.layouts
    is_plain = (configs.each(lambda s: float(s.stack.plain_context_attention)) > 0) & (layouts.cp > 1)

    def uses(method: str) -> NDArray[np.bool_]:
        return np.asarray(is_plain & (layouts.cp_method == CONTEXT_METHODS.index(method)))

    is_ring = uses("ring")
    return ContextAttention(
        blocks=blocks,
        cp=layouts.cp.astype(np.float64),
        microbatch_size=layouts.microbatch_size.astype(np.float64),
        is_ring=is_ring,
        gathers_keys=uses("all-gather"),
        is_compiled=layouts.compiles_blocks,
        element_bytes=configs.each(lambda s: float(s.workload.activation_element_bytes)),
        by_rows=is_ring & (configs.each(lambda setup: float(_has_no_kernel(setup))) > 0),
        num_sms=configs.each(lambda setup: num_sms(setup.cluster.device)),
        is_new=configs.each(lambda s: float(is_blackwell(s.cluster.device))) > 0,
    )
