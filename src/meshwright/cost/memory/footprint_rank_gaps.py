"""What the allocator of one pipeline rank reserves next to its tensors: pools of streams, and gaps.

A gap was freed and is too narrow for a tensor that comes later. Where segments are expandable, torch's allocator then
maps further pages, and gives those without a live byte back where the device is full (simulator/memory/allocator.py).
So a rank reserves such gaps as long as there is room, and needs none of them.
"""

from typing import NamedTuple

import numpy as np

from meshwright.cost.layout_table import Floats
from meshwright.cost.memory.footprint_constants import FRAGMENTATION
from meshwright.cost.memory.footprint_rank_tensors import RankTensors

Parts = dict[str, Floats]
"""Bytes by field of MemoryUse."""


def total(parts: Parts) -> Floats:
    """Return the bytes of all classes together, but for what is cached, which no rank needs."""
    needed = (values for name, values in parts.items() if name != "cached_bytes")
    return np.asarray(sum(needed, start=np.zeros(1)))


def largest(options: list[Parts]) -> Parts:
    """Return of each layout those of the `options` that are most bytes in all, the first of equals."""
    worst = np.stack([total(parts) for parts in options]).argmax(axis=0)
    found = options[0]
    for number, parts in enumerate(options[1:], start=1):
        is_worst = worst == number
        found = {name: np.where(is_worst, parts[name], found[name]) for name in found}
    return found


class Moment(NamedTuple):
    """Bytes at one moment of a step that come and go."""

    parts: Parts
    elsewhere: Floats
    """Of them in the allocator's pools of other streams than the one that computes."""
    gaps: Floats
    """Freed before, and too narrow for the tensors of this moment."""
    cached: Floats
    """The same of what the allocator gives back where the device has no room for it."""


class RankGaps(RankTensors):
    """What one pipeline rank reserves and wide tensors leave unused below them, one element a layout."""

    def reserved(self, moments: list[Moment]) -> tuple[Floats, Floats]:
        """Return what the allocator needs for all that comes and goes, and what more it caches where there is room: a
        freed block serves its own stream only.

        FSDP2 gathers on one stream and reduces on another, so that the most of each adds up, whenever that is. A model
        that is one graph (layout.compile = "model"), and one whose microbatches are graphs (layout.cuda_graphs), which
        has no FSDP2, allocate all on the stream that computes.
        """
        layouts = self.memory.layouts
        on_one_stream = self.is_graph | layouts.cuda_graphs
        # A rank's shard in the format that is gathered lies next to the whole.
        one_block = self.block.whole * self.gather_bytes
        of_shard = self.block.shared * self.gather_bytes * self.on_device
        # A pipeline gathers what it keeps before its first microbatch, on the stream that computes.
        is_concurrent = self.gathers & (self.is_resharded | (layouts.pp == 1))
        ends = self.lasting.maximum(self.after_blocks)
        copied_block, copied_ends = self.copied(self.block), self.copied(ends)
        of_blocks = copied_block + (self.num_gathered - 1) * one_block
        at_once = ends.whole * self.compute_bytes + np.maximum(of_blocks, copied_ends)
        # What the ends leave serves blocks that are no larger.
        below = np.where(self.block.whole > ends.whole, ends.whole * self.compute_bytes, 0.0)
        ahead = np.where(is_concurrent, np.maximum(at_once, below + of_blocks + one_block) + of_shard, 0.0)
        shards = self.new_shards(self.elements.trained_shared)
        # Where shards exist already, those of the next microbatch are made next to them and added, unit by unit.
        # Those that the host adds up are made on the device, too.
        summed = self.reduce_bytes if self.casts_sums else self.bytes.shared_gradient
        unit = np.maximum(self.lasting.trained_shared, self.block.trained_shared) * summed
        reduced = np.where(
            self.reduces_each | ~self.keeps_gradients | self.frees_gradients, self.is_sharded * unit, shards
        )
        divided = self.divided(self.lasting.maximum(self.block))
        computing = [total(one.parts) - one.elsewhere * ~on_one_stream + one.gaps for one in moments]
        most: Floats = np.max(np.stack(computing), axis=0)
        # Of fixed segments a large tensor has one of its own.
        is_expandable = self.memory.setup.stack.expandable_segments
        computed = most * (1 + FRAGMENTATION["expandable" if is_expandable else "fixed"])
        needed = computed + (ahead + reduced + divided) * ~on_one_stream
        with_cached = np.max([bare + one.cached for bare, one in zip(computing, moments, strict=True)], axis=0)
        return needed, (with_cached - computed).clip(0) * is_expandable

    def logits_gap(self) -> Floats:
        """Return the gap that logits leave above the activations."""
        return self.is_last * self.memory.ends.freed_logits_bytes

    def gaps_of_window(self) -> Floats:
        """Return the gaps that the block before the last leaves when its activations are on the host, and the last's
        parameters: they lie between what stays, each narrower than logits that are more than a block keeps.
        """
        window, is_moved = self.blocks.window, self.blocks.window > 0
        freed = window + self.is_resharded * self.block.whole * self.gather_bytes
        return np.where(is_moved & (self.memory.ends.one_logits_bytes > window), freed, 0.0)

    def below_last_input(self, read: Floats) -> Floats:
        """Return what lies below the input of the last reduction, one tensor of `read` bytes, if it finds no gap; 0 if
        it does.

        From below: gathered parameters, freed by now; a gap that activations, logits and a block's parameters leave;
        the head's gradients, which the loss makes. Those of the embedding lie in that gap, or above it where they are
        wider; then both gaps are one. Gradients of a block that are reduced meanwhile may cut the gap in two. Ignored:
        that of two such pieces the embedding's may take the lower one, so that the gaps are two; it hangs on a few MiB.
        """
        below, head = self.gathered(np.zeros(1)), self.head_gradients()
        embedding = self.memory.ends.first.trained_whole * self.is_first * self.compute_bytes
        gap = self.kept.most + self.logits_gap() + self.block.whole * self.gather_bytes
        # Next to what they read, these need a place for the block's parameters and their whole gradients.
        is_cut = gap > self.reduced() + (
            self.block.whole * self.gather_bytes + self.block.trained_whole * self.compute_bytes
        )
        is_inside = embedding <= np.where(is_cut, (gap - self.reduced()) / 2, gap)
        parts_gaps = is_inside & ~is_cut
        is_low = read <= np.where(parts_gaps, gap, below + gap) - is_inside * embedding
        adds_later = self.accumulates & ~self.reduces_each
        has_gaps = self.gathers & ~self.is_graph & (self.memory.layouts.pp == 1) & ~adds_later
        above = below + gap + head + ~is_inside * (self.reduced() + embedding)
        return np.asarray(has_gaps * ~is_low * above)
