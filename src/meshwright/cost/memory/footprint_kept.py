"""The activations that a pipeline rank keeps for backward, its loss's included.

    kept    chunks in flight x a chunk + gradients that wait for the weights' backward + what was sent and received
    losses  where all forwards come first, what the loss keeps of each microbatch that waits for its backward

A chunk is a stage's share of one microbatch (footprint_stages.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.memory.footprint_blocks import ModelMemory
from meshwright.cost.memory.footprint_chunks import ChunkBytes
from meshwright.cost.memory.footprint_rank_blocks import RankBlocks, held_by_chunks
from meshwright.cost.memory.footprint_stages import Ints, chunks_in_flight, losses_in_flight, losses_pending
from meshwright.cost.training_setup import Floats
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.spec.step.stack import Stack


@dataclass(frozen=True)
class SavedActivations:
    """Bytes on one rank, one element a layout."""

    most: Floats
    """At the moment of a step when they are most."""
    at_loss: Floats
    """While the rank computes a loss, if it does; else at most."""
    by_others: Floats
    """Of all chunks but one."""
    chunk: Floats
    """What a microbatch keeps on one stage."""
    of_loss: Floats
    """What a microbatch keeps behind the blocks until its backward."""
    num_waiting: Floats
    """Losses that wait for their backward while the last one is computed."""
    gaps: Floats
    """Gaps that gradients of logits leave which waited for the backward to the weights."""


def saved_activations(
    memory: ModelMemory, blocks: RankBlocks, is_last: Floats, num_microbatches: Floats, pp_rank: Ints
) -> SavedActivations:
    """Return what rank `pp_rank` keeps of its `blocks`, and of the loss if it is a last one."""
    layouts, ends, stages = memory.layouts, memory.ends, memory.layouts.stages_per_rank
    chunks = chunks_in_flight(layouts, num_microbatches, pp_rank)
    of_chunk = ChunkBytes(blocks.kept / stages, blocks.pending / stages, is_last * ends.one_logits_bytes)
    held = held_by_chunks(memory, num_microbatches, pp_rank, of_chunk)
    of_blocks = held.most + _passed_on(memory, chunks)
    chunk = of_blocks / np.maximum(chunks, 1)
    of_loss = is_last * (ends.last_kept_bytes + ends.kept_loss_bytes)
    num_waiting = losses_in_flight(layouts, num_microbatches) - 1
    of_losses = num_waiting * of_loss
    most = of_blocks + of_losses + is_last * ends.last_kept_bytes
    return SavedActivations(
        most=most,
        at_loss=most - (held.most - held.at_loss),
        by_others=of_blocks - chunk + of_losses,
        chunk=chunk,
        of_loss=of_loss,
        num_waiting=num_waiting,
        # Freed one after the other, between forwards whose activations go there before the next loss.
        gaps=is_last
        * ends.one_logits_bytes
        * (not memory.is_wide)
        * losses_pending(layouts, num_microbatches, pp_rank),
    )


def _passed_on(memory: ModelMemory, chunks: Floats) -> Floats:
    """Return the bytes of what a pipeline's stages have sent and still hold, and of what they receive early."""
    layouts, stack = memory.layouts, memory.setup.stack
    passed = np.where(layouts.pp > 1, memory.shared_stream_bytes, 0.0)
    # Of what is sent the newest of each stage is held, both ways, and the next message each way is received early.
    on_the_way = passed * (2 * layouts.stages_per_rank + 2) * stack.frees_sent
    return passed * ~_frees_sent(stack, layouts) * chunks + on_the_way


def _frees_sent(stack: Stack, layouts: LayoutTable) -> NDArray[np.bool_]:
    """Return whether a stage frees what it hands on once that is sent, or holds it until its gradient comes back.

    Megatron's later releases free it; ours do unless backwards are split, for which torch needs the tensor.
    """
    if stack.kernels == "fused" and stack.attention == "flash":
        return np.ones(len(layouts), np.bool_)
    splits = layouts.has_schedule(SPLIT_BACKWARD_SCHEDULES)
    return ~splits & stack.frees_sent
