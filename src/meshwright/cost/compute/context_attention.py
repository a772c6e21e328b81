"""ContextAttention: what attention computes besides its causal kernels: parts of a sequence split over cp, and masks.

For stacks that make it of torch's own operators (Stack.plain_context_attention). P ranks hold two chunks each, S
positions; T = P S; the elements of a rank's queries, keys and values are those of S positions.

    ring        P pieces, each with keys of S / 2 positions: kernels reach the rate of a context that is P times
                shorter. Each piece is merged into a float32 sum by the logsumexps (a: bytes of an activation):
                    forward    4 + a for the own piece, 16 + a + 68 / head width for each other one; 4 + a at the end
                    backward   8 + a for each piece into the gradients of queries, of half of the keys and values (own:
                               all); 4 to zero them, 4 + a at the end
                These are the bytes of a query's element on the last rank, whose queries see all other ranks' keys: the
                others, which merge as little as half of theirs, wait for it.
                Of documents, and in 32 bits on an accelerator, no kernel takes a piece (matmul.py): they
                are in float32, other ranks' as large as the first rank's, half of whose queries see all their keys
    all-gather  keys and values of T positions are joined and put in order, their gradients added up and put back; its
                mask costs more: the first chunk of rank r attends to r + 1 chunks, the second to 2 P - r: (2 P + 1) /
                (2 P) of the causal work. Without documents all sequences share one mask
    sparse      FlexAttention and varlen_attn compute the scores that documents and windows leave, in blocks of 128:
                half a block more at the far end of what a query sees
    documents   of ours else: one mask for each sequence, T x T, made in every block, for whole sequences and for those
                that ulysses makes whole: twice the causal work, at the rate of a context of T keys. A ring's documents:
                matmul.py

Kernels compute the scores that a mask hides. Counted in models/attention/causal_attention.py, in ring_attention.py and
context_parallel.py of parallelism/context, and in their traces of 2026-11-23. Ignored: that kernels read the mask,
which all heads share and caches hold.
"""

import numpy as np

from meshwright.cost.achieved_rates import is_blackwell, num_sms
from meshwright.cost.attention_rates import ring_slowdown
from meshwright.cost.blocks.block_table import BlockTable
from meshwright.cost.compute.matmul import AttentionByRows
from meshwright.cost.compute.op_shapes import NARROW_HEAD
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import CONTEXT_METHODS, Bools, Floats, Ints, Passes
from meshwright.cost.training_setup import Configurations

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
_CAUSAL_BYTES, _DOCUMENTS_BYTES = 4.0, 4.0
"""Of one score of a mask in eager code: ones (1), cut to a triangle (2), read (1); for each sequence equal documents
(1), joined with the triangle (2), read (1). What is added to scores is written besides; that is all of a compiled
mask."""
_CHUNK_KERNELS = 4.0
"""A compiled concatenation has a kernel for each of the 2 P chunks of keys, and of values."""


class ContextAttention:
    """What attention computes besides its causal kernels, one element a configuration."""

    def __init__(self, configs: Configurations, blocks: BlockTable) -> None:
        layouts = configs.layouts
        is_split = layouts.cp > 1
        is_plain = is_split & configs.has(lambda s: s.stack.plain_context_attention)

        def uses(method: str) -> Bools:
            return np.asarray(layouts.cp_method == CONTEXT_METHODS.index(method))

        self.blocks, self.configs = blocks, configs
        self.skips_masked = configs.has(lambda s: s.skips_masked)
        self.seq_len = configs.each(lambda s: s.workload.seq_len)
        self.cp = layouts.cp.astype(np.float64)
        self.microbatch_size = layouts.microbatch_size.astype(np.float64)
        self.element_bytes = configs.each(lambda s: s.workload.activation_element_bytes)
        self.is_compiled = layouts.compiles_blocks
        self.is_ring, self.gathers_keys = is_plain & uses("ring"), is_plain & uses("all-gather")
        self.masks_documents = configs.has(lambda s: s.masks_scores)
        self.masks_sequence = self.masks_documents & (~is_split | uses("ulysses"))
        """Whether a mask hides documents of a whole sequence."""
        self.has_wide_pieces = self.is_ring & configs.has(lambda s: s.has_wide_activations)
        self.num_sms = configs.each(lambda s: num_sms(s.cluster.device))
        self.is_new = configs.has(lambda s: is_blackwell(s.cluster.device))
        """Whether small tiles are less efficient."""

    @property
    def by_rows(self) -> Bools:
        """Return whether pieces of a ring have no kernel, as parallelism/torch_private/torch_attention.py says."""
        return (self.is_ring & self.masks_documents) | self.has_wide_pieces

    def slowdown(self, row: Ints, c: Constants) -> Passes:
        """Return the time of attention kernels over that of the rank's share of the causal whole, both passes."""
        context, ramp = self.blocks.context[row], c["attention_ramp_tokens"]
        pieces = (1 + ramp * self.cp / context) / (1 + ramp / context)
        whole = (self.seq_len + ramp) / (context + ramp)
        masked = np.where(self.masks_sequence, whole, np.where(self.gathers_keys, 1 + 0.5 / self.cp, 1.0))
        skipped = (self.blocks.computed_context[row] + ramp) / (context + ramp)
        masked = np.where(self.skips_masked, skipped, masked)
        forward, backward = self._ring_kernels(row, c)
        return (
            np.where(self.is_ring, pieces * forward, 1.0) * masked,
            np.where(self.is_ring, pieces * backward, 1.0) * masked,
        )

    def kept_share(self, row: Ints) -> Floats:
        """Return the share of attention's model FLOPs that is left where documents' masked scores are skipped."""
        left = np.minimum(self.blocks.computed_context[row] / self.blocks.context[row], 1.0)
        return np.where(self.skips_masked, left, 1.0)

    def _ring_kernels(self, row: Ints, c: Constants) -> Passes:
        """Return the time of a ring's kernel over that of whole sequences, both passes."""
        setups, is_narrow = self.configs.setups, self.blocks.head_width[row] < NARROW_HEAD
        wide, narrow = (
            np.array([ring_slowdown(setup, c, is_narrow=one) for setup in setups])[self.configs.setup_index].T
            for one in (False, True)
        )
        forward, backward = np.where(is_narrow, narrow, wide)
        return forward, backward

    def mask_bytes(self) -> Floats:
        """Return the bytes that making the mask of one block reads and writes, in forward."""
        of_chunks = self.seq_len**2 / self.cp / 2 * (1 + 0.5 / self.cp)
        scores = np.where(self.masks_sequence, self.seq_len**2, of_chunks * self.gathers_keys)
        masks = np.where(self.masks_documents, self.microbatch_size, 1.0)
        eager = _CAUSAL_BYTES + self.microbatch_size * _DOCUMENTS_BYTES * self.masks_documents
        return scores * (np.where(self.is_compiled, 0.0, eager) + masks * self.element_bytes)

    def rows_s(self, row: Ints, matmul_rate: Floats, memory_rate: Floats, c: Constants) -> tuple[Passes, Passes]:
        """Return the seconds of pieces by rows, each forward and backward: of matrix products, and of the rest."""
        own, other = self._rows(row, 1.0), self._rows(row, 0.5)
        small_tile = np.where(self.is_new, c["small_tile.blackwell"], 1.0)
        rates = matmul_rate, memory_rate, self.num_sms, small_tile
        products, more = own.products_s(*rates), other.products_s(*rates)
        passes, others = own.passes_s(memory_rate, c["kernel_s"]), other.passes_s(memory_rate, c["kernel_s"])
        return _times(products, more, self.cp - 1), _times(passes, others, self.cp - 1)

    def _rows(self, row: Ints, share: float) -> AttentionByRows:
        """Return the attention of a `share` of the rank's queries to as many keys as it has of all."""
        blocks = self.blocks
        tokens, width = blocks.tokens[row], np.maximum(blocks.head_width[row], 1.0)
        positions = tokens / self.microbatch_size
        return AttentionByRows(
            sequences=self.microbatch_size,
            queries=positions * share,
            keys=positions,
            heads=blocks.attention_flops[row] / (4 * blocks.context[row] * tokens * width),
            kv_heads=blocks.kv_elements[row] / (2 * tokens * width),
            width=width,
        )

    def kernels(self) -> Passes:
        """Return the kernels that a block has more, forward and backward."""
        merges, ends, cp = _KERNELS_OF_MERGE, _KERNELS_OF_ENDS, self.cp
        chunks = _CHUNK_KERNELS * cp * (self.gathers_keys & self.is_compiled)
        ring = (cp - 1) * merges[0] + ends[0], cp * merges[1] + ends[1]
        return ring[0] * self.is_ring + chunks, ring[1] * self.is_ring + chunks

    def moved_bytes(self, row: Ints) -> Passes:
        """Return the bytes that one block reads and writes besides, forward and backward."""
        (ring_f, ring_b), (gather_f, gather_b) = self._ring_bytes(row), self._gathered_bytes(row)
        return (
            ring_f * self.is_ring + gather_f * self.gathers_keys,
            ring_b * self.is_ring + gather_b * self.gathers_keys,
        )

    def _ring_bytes(self, row: Ints) -> Passes:
        blocks, cp, cast = self.blocks, self.cp, _WIDE + self.element_bytes
        piece = _WIDE + np.where(self.by_rows, _WIDE, self.element_bytes)
        # Heads x their width, which is not the residual stream's in every model.
        queries = blocks.attention_flops[row] / (4 * blocks.context[row])
        keys, heads = blocks.kv_elements[row], queries / np.maximum(blocks.head_width[row], 1.0)
        merged = queries * (3 * _WIDE + piece) + heads * _LOGSUMEXP_BYTES
        gradients = (_WIDE + piece) * (cp * queries + (cp + 1) / 2 * keys)
        return (piece + cast) * queries + (cp - 1) * merged, gradients + (_WIDE + cast) * (queries + keys)

    def _gathered_bytes(self, row: Ints) -> Passes:
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
