"""Which blocks a pipeline rank holds, by what they save, what these take, and the activations kept for backward.

    kept    chunks in flight x a chunk + gradients that wait for the weights' backward + what was sent and received
    losses  where all forwards come first, what the loss keeps of each microbatch that waits for its backward

A chunk is a stage's share of one microbatch (footprint_stages.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, Bools, Floats, Ints, LayoutTable
from meshwright.cost.memory.footprint_blocks import ModelMemory
from meshwright.cost.memory.footprint_chunks import ChunkBytes, HeldBytes, held_bytes
from meshwright.cost.memory.footprint_stages import chunks_in_flight, losses_in_flight, losses_pending, stages_of_rank
from meshwright.cost.memory.footprint_states import Elements
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.spec.step.stack import Stack


def blocks_of_rank(memory: ModelMemory, pp_rank: Ints) -> tuple[Floats, Floats, list[Floats]]:
    """Return (whether it has the first stage, the last, its blocks of each group by what they save), one element a
    layout, blocks as [policies, layouts].
    """
    layouts = memory.layouts
    ends = np.cumsum([block.count for block in memory.blocks])
    stages = stages_of_rank(layouts, pp_rank)
    first, stop = memory.cuts.first_block(stages), memory.cuts.first_block(stages + 1)
    counts = []
    for block, end in zip(memory.blocks, ends, strict=True):
        low, high = np.maximum(first, end - block.count), np.minimum(stop, end)
        counts.append(_by_policy(layouts, first, low, np.where(stages >= 0, np.maximum(high, low), low)))
    is_first, is_last = (stages == 0).any(axis=0), (stages == layouts.num_stages - 1).any(axis=0)
    return is_first.astype(np.float64), is_last.astype(np.float64), counts


def most_blocks_of_stage(memory: ModelMemory, pp_rank: Ints) -> Ints:
    """Return the blocks of the longest of the rank's stages, one element a layout."""
    stages = stages_of_rank(memory.layouts, pp_rank)
    return np.asarray((memory.cuts.first_block(stages + 1) - memory.cuts.first_block(stages)).max(axis=0))


@dataclass(frozen=True)
class RankBlocks:
    """What a rank's blocks take, one element a layout; bytes are those of one microbatch."""

    elements: Elements
    """Of all of them and of what stands before and after them."""
    largest: Elements
    """Of the largest block."""
    matrices: Floats
    """Elements of the matrices of all blocks, after data-parallel ranks have divided them."""
    kept: Floats
    """Bytes that all of them keep from forward to backward, on the device."""
    least_kept: Floats
    """Bytes that the block keeps which keeps least; 0 where they wait on the host."""
    moved: Floats
    """Bytes that wait on the host meanwhile."""
    window: Floats
    """Bytes of what was moved that are on the device while a block runs: its own, and those on their way."""
    pending: Floats
    """Bytes that all of them hold for a backward to the weights that runs later."""
    recomputed: Floats
    """Bytes that recomputation of one block adds, less those that blocks behind it have freed by then."""
    transient: Floats
    """Bytes that backward of one block makes and frees."""
    low_copies: Floats
    """Bytes of the operands of one grouped matmul in low precision."""


def rank_blocks(memory: ModelMemory, counts: Sequence[Floats], outside: Elements, pp_rank: Ints) -> RankBlocks:
    """Return what the blocks of rank `pp_rank` take, whose `counts` blocks_of_rank returned, next to `outside`."""
    stages, cuts = stages_of_rank(memory.layouts, pp_rank), memory.cuts
    # The last stage of a short model has the head alone.
    has_blocks = cuts.first_block(stages + 1) > cuts.first_block(stages)
    has_last_block = ((stages == memory.layouts.num_stages - 1) & has_blocks).any(axis=0)
    kept = pending = recomputed = transient = low_copies = matrices = np.zeros(len(memory.layouts))
    elements, largest, least_kept = outside, Elements.none(memory.layouts), np.full(len(memory.layouts), np.inf)
    for block, by_policy in zip(memory.blocks, counts, strict=True):
        count = by_policy.sum(axis=0)
        is_here = count > 0
        kept = kept + (by_policy * block.kept_bytes).sum(axis=0)
        pending = pending + count * block.pending_bytes
        elements = elements + block.elements * count
        matrices = matrices + block.matrices * count
        largest = largest.maximum(block.elements * is_here)
        least_kept = np.minimum(least_kept, np.where(by_policy > 0, block.kept_bytes, np.inf).min(axis=0))
        again = np.where(by_policy > 0, block.all_kept_bytes - block.kept_bytes, 0.0).max(axis=0)
        recomputed = np.maximum(recomputed, again)
        transient = np.maximum(transient, block.transient_bytes * is_here)
        low_copies = np.maximum(low_copies, block.low_copies_bytes * is_here)
    is_moved = memory.layouts.activation_offload & memory.moves_activations
    # What waits on the host is not there to be freed.
    num_freed = np.where(is_moved, 0, _num_kept_behind(memory, pp_rank))
    freed = np.min([block.all_kept_bytes for block in memory.blocks], axis=0) * num_freed
    stays, window = _offloaded(memory, counts, has_last_block.astype(np.float64))
    return RankBlocks(
        elements=elements,
        largest=largest,
        matrices=matrices,
        kept=np.where(is_moved, stays, kept),
        least_kept=np.where(is_moved | np.isinf(least_kept), 0.0, least_kept),
        moved=np.where(is_moved, kept - stays, 0.0),
        window=np.where(is_moved, window, 0.0),
        pending=pending,
        recomputed=(recomputed - freed).clip(0),
        transient=transient,
        low_copies=low_copies,
    )


def _offloaded(memory: ModelMemory, counts: Sequence[Floats], has_last_block: Floats) -> tuple[Floats, Floats]:
    """Return (bytes that the last stage's last block keeps, where the rank has it, bytes of two blocks of the rank less
    these): what activation_offload leaves on the device.
    """
    none = np.zeros(len(memory.layouts))
    largest = none
    for block, by_policy in zip(memory.blocks, counts, strict=True):
        largest = np.maximum(largest, np.where(by_policy > 0, block.kept_bytes, 0.0).max(axis=0))
    # Which policy the last block has, its rank's blocks of its group say: the one that is most of them.
    last, by_policy = memory.blocks[-1], counts[-1]
    stays = has_last_block * np.take_along_axis(last.kept_bytes, by_policy.argmax(axis=0)[None], axis=0)[0]
    return stays * (by_policy.sum(axis=0) > 0), 2 * largest - stays


def _held_by_chunks(memory: ModelMemory, num_microbatches: Floats, pp_rank: Ints, chunk: ChunkBytes) -> HeldBytes:
    """Return what the chunks in flight take, of unequal stages where the stack balances them."""
    stages = stages_of_rank(memory.layouts, pp_rank)
    blocks = memory.cuts.first_block(stages + 1) - memory.cuts.first_block(stages)
    is_balanced = memory.setup.stack.stages == "balanced"
    counted = blocks if is_balanced else np.ones_like(blocks)
    return held_bytes(memory.layouts, num_microbatches, pp_rank, counted, chunk)


def _num_kept_behind(memory: ModelMemory, pp_rank: Ints) -> Ints:
    """Return how many blocks behind the last recomputed one of a stage keep everything: that is freed before it runs
    again. Of a rank's stages the one with fewest counts.
    """
    layouts = memory.layouts
    if layouts.checkpoint_of_block is not None:
        return np.zeros(len(layouts), np.int64)
    stages = stages_of_rank(layouts, pp_rank)
    size = memory.cuts.first_block(stages + 1) - memory.cuts.first_block(stages)
    behind = np.where((stages >= 0) & (size > 0), (size - 1) % layouts.activation_checkpoint_every, size.max())
    return np.asarray(behind.min(axis=0))


def _by_policy(layouts: LayoutTable, stage_first: Ints, first: Ints, stop: Ints) -> Floats:
    """Return how many of the blocks from `first` to `stop` [stages, layouts] save what [policies, layouts], on stages
    that begin at `stage_first`.
    """
    count = (stop - first).sum(axis=0).astype(np.float64)
    policies = np.arange(len(ACTIVATION_CHECKPOINTS))[:, None]
    if layouts.checkpoint_of_block is None:
        every = layouts.activation_checkpoint_every
        wrapped = (np.ceil((stop - stage_first) / every) - np.ceil((first - stage_first) / every)).sum(axis=0)
        return np.where(policies == layouts.activation_checkpoint, wrapped, 0.0) + np.where(
            policies == 0, count - wrapped, 0.0
        )
    saves = layouts.checkpoint_of_block[None] == policies[..., None]
    before = np.concatenate([np.zeros((*saves.shape[:2], 1)), np.cumsum(saves, axis=2)], axis=2)
    row = np.arange(len(layouts))
    return np.asarray((before[:, row, stop] - before[:, row, first]).sum(axis=1))


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
    on_host: Floats
    """Of all chunks in the host's memory, at most."""
    gaps: Floats
    """Gaps that gradients of logits leave which waited for the backward to the weights."""


def saved_activations(
    memory: ModelMemory, blocks: RankBlocks, is_last: Floats, num_microbatches: Floats, pp_rank: Ints
) -> SavedActivations:
    """Return what rank `pp_rank` keeps of its `blocks`, and of the loss if it is a last one."""
    layouts, ends, stages = memory.layouts, memory.ends, memory.layouts.stages_per_rank
    none = np.zeros(len(layouts))
    chunks = chunks_in_flight(layouts, num_microbatches, pp_rank)
    of_chunk = ChunkBytes(blocks.kept / stages, blocks.pending / stages, is_last * ends.late_gradients_bytes)
    held = _held_by_chunks(memory, num_microbatches, pp_rank, of_chunk)
    moved = _held_by_chunks(memory, num_microbatches, pp_rank, ChunkBytes(blocks.moved / stages, none, none))
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
        on_host=moved.most,
        # Freed one after the other, between forwards whose activations go there before the next loss.
        gaps=is_last
        * ends.late_gradients_bytes
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


def _frees_sent(stack: Stack, layouts: LayoutTable) -> Bools:
    """Return whether a stage frees what it hands on once that is sent, or holds it until its gradient comes back.

    Megatron's later releases free it; ours do unless backwards are split, for which torch needs the tensor.
    """
    if stack.kernels == "fused" and stack.attention == "flash":
        return np.ones(len(layouts), np.bool_)
    splits = layouts.has_schedule(SPLIT_BACKWARD_SCHEDULES)
    return ~splits & stack.frees_sent
