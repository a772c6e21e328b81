"""The memory of one pipeline rank at the moment of a step when it has the least to spare.

    loss       all kept activations, logits and what the loss makes of them; in chunks of tokens, one chunk's and the
               gradients of the head
    backward   all kept activations, and those of two blocks where they wait on the host; the block at work is
               recomputed and has its gradients; its parameters are gathered, and those of the next
    ends       a pipeline reduces a microbatch's gradients of what stands outside of blocks: the activations of that
               microbatch and stage are freed
    last       what stands outside of blocks is reduced, when all else is: whole gradients, and what the reduction reads
    end        the activations of one block, the gradients of all others: the peak where one microbatch is all, since
               sharded gradients then grow as activations go
    reduction  the last block's gradients are reduced, and what only its backward needed is freed

FSDP2 keeps what stands outside of blocks gathered from forward to the end of backward, and the blocks too unless they
are freed after forward. Where gradients are reduced once a step, those of earlier microbatches add up whole, in the
format in which they are reduced; where each microbatch is reduced, their shards do. A pipeline's stage that sends
gradients to the one before holds the input of its last reduction until the next. Ignored: that the input of the
last reduction, one tensor, finds no gap in the allocator where all activations take less.
"""

from typing import NamedTuple

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints
from meshwright.cost.memory.footprint_blocks import ModelMemory
from meshwright.cost.memory.footprint_constants import FRAGMENTATION, WORKSPACE_BYTES
from meshwright.cost.memory.footprint_rank_blocks import blocks_of_rank, rank_blocks, saved_activations
from meshwright.cost.memory.footprint_stages import backward_rounds, runs_forwards_first
from meshwright.cost.memory.footprint_states import Elements, state_bytes
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

Parts = dict[str, Floats]
"""Bytes by field of MemoryUse."""


def total(parts: Parts) -> Floats:
    """Return the bytes of all classes together."""
    return np.asarray(sum(parts.values(), start=np.zeros(1)))


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


class RankFootprint:
    """What one pipeline rank of an accelerator holds."""

    workspace_bytes = 2 * WORKSPACE_BYTES
    """Of libraries, throughout a step."""

    def __init__(self, memory: ModelMemory, num_microbatches: Floats, pp_rank: Ints) -> None:
        self.memory, layouts, stack = memory, memory.layouts, memory.setup.stack
        self.is_first, self.is_last, counts = blocks_of_rank(memory, pp_rank)
        self.after_blocks = memory.ends.last * self.is_last
        self.outside = memory.ends.first * self.is_first + self.after_blocks
        is_one_unit = np.full(len(layouts), float(not stack.shards_ends_apart))
        self.lasting, self.lasting_head = self.outside * is_one_unit, self.after_blocks * is_one_unit
        """What stays gathered from forward to the end of backward, and what of it has gradients before the end."""
        self.blocks = rank_blocks(memory, counts, self.outside, pp_rank)
        self.elements, self.block = self.blocks.elements, self.blocks.largest
        self.all_blocks = self.elements.whole - self.outside.whole
        self.in_blocks = self.elements.shared - self.outside.shared
        """Shards of all of them."""
        self.frees_gradients = memory.setup.workload.updates_in_backward
        """Whether a gradient is used, and freed, as soon as it is reduced."""
        self.kept = saved_activations(memory, self.blocks, self.is_last, num_microbatches, pp_rank)
        self.rounds = backward_rounds(layouts, num_microbatches, pp_rank)
        self.bytes = state_bytes(memory.setup.workload, stack)
        self.is_sharded = stack.sharding == "parameters"
        self.copies = self.is_sharded & ~self._sums_in_place()
        """Whether FSDP2 copies what one rank holds whole: parameters, and gradients into reductions and divided."""
        self.gathers = self.is_sharded & (layouts.fsdp > 1)
        # Graphs add to gradients that live through the step, as if there were earlier microbatches.
        self.accumulates = (num_microbatches > 1) | layouts.cuda_graphs
        self.reduces_each = self.accumulates & layouts.reduces_each_microbatch
        # Our runtime frees nothing that one rank holds whole.
        self.is_resharded = layouts.is_resharded & ((layouts.fsdp > 1) | (not memory.setup.is_own))
        self.stays_gathered = self.reduces_each & ~self.is_resharded
        """Whether parameters stay gathered from one microbatch to the next."""
        self.reduces_last = (layouts.pp > 1) & stack.reduces_after_pipeline & self.is_sharded & ~self.reduces_each
        self.compute_bytes = memory.element_bytes
        self.gather_bytes = memory.gather_bytes
        self.reduce_bytes = float(BYTES_PER_ELEMENT[memory.setup.workload.gradient_dtype])
        self.sums = self.elements.whole * self.reduce_bytes
        """Bytes of all gradients, whole."""
        self.num_gathered = 1.0 + np.maximum(layouts.prefetch, 1)
        """Blocks at work and gathered ahead; forward gathers one ahead anyway, since the host does not wait."""
        self.on_device = np.where(layouts.cpu_offload, 0.0, 1.0)
        # Replicas sum shards once a step, and FSDP2 keeps them on the device until then.
        self.keeps_gradients = ~layouts.cpu_offload | (layouts.dp_replicate > 1)

    def _sums_in_place(self) -> Bools:
        """Return where gradients are summed over replicas where they are."""
        layouts = self.memory.layouts
        return np.asarray(self.memory.setup.sums_in_place & layouts.is_replicated & ~layouts.compiles_model)

    def parts(self) -> Parts:
        """Return the bytes by tensor class when the rank has the least to spare, but context_bytes."""
        states = self._states()
        moments = [self._loss(), self._backward(), self._end(), self._block_reduction(), self._last_reduction()]
        moments.append(self._ends_reduction())
        parts = largest([moment.parts for moment in moments])
        fragmentation = self.reserved(moments) - total(parts)
        parts["gradients_bytes"] = parts["gradients_bytes"] + states.pop("gradients_bytes")
        return states | parts | {"fragmentation_bytes": fragmentation}

    def _states(self) -> Parts:
        """Return what stays allocated throughout a step."""
        whole, shared, size = self.elements.whole, self.elements.shared * self.on_device, self.bytes
        setup, ends = self.memory.setup, self.memory.ends
        # Managed memory (memory.* = "uvm") is the host's.
        embedding = ends.embedding(self.is_first, self.is_last) * setup.pools_embedding * self.on_device
        stays = float(not setup.pools_optimizer_state)
        # Shards of gradients exist before the end of a step only where every microbatch is reduced.
        shards = self.elements.shared * size.shared_gradient * (self.reduces_each & self.keeps_gradients)
        # What Muon and 8 bits save is in the matrices of blocks.
        saved = self.blocks.matrices * self.on_device * (size.shared_optimizer - size.shared_matrix_optimizer)
        return {
            "parameters_bytes": whole * size.whole_parameter + (shared - embedding) * size.shared_parameter,
            "gradients_bytes": whole * size.whole_gradient + shards,
            "optimizer_state_bytes": stays * (shared * size.shared_optimizer - saved),
        }

    def _loss(self) -> Moment:
        """Return what the last stage adds while it computes the loss; others have nothing to compute there."""
        return self._moment(
            unsharded_parameters_bytes=self._gathered(np.where(self.is_resharded, 0.0, self.all_blocks))
            + self._kept_copies(self.all_blocks)
            + self.is_sharded * (self.after_blocks.whole - self.lasting.whole).clip(0) * self.compute_bytes
            + self.is_last * self.memory.ends.early_gradients_bytes,
            gradients_bytes=self._added_up(),
            activations_bytes=self.kept.at_loss,
            logits_bytes=self.is_last * self.memory.ends.logits_bytes,
            communication_buffers_bytes=self._retained(),
        )

    def _backward(self) -> Moment:
        """Return what the first block's backward adds."""
        # Blocks that are gathered while one computes, where the others are freed.
        few_blocks = np.minimum(self.num_gathered * self.block.whole, self.all_blocks)
        at_work = np.where(self.is_resharded, few_blocks, self.all_blocks)
        return self._moment(
            unsharded_parameters_bytes=self._gathered(at_work)
            + self._kept_copies(self.all_blocks - few_blocks)
            + self._own_gradients(is_end=False),
            gradients_bytes=self._added_up(),
            activations_bytes=self.kept.most + self.blocks.window + self.blocks.recomputed,
            communication_buffers_bytes=np.where(self.reduces_last, 0.0, self._reduced_next()),
            workspace_bytes=self.blocks.transient,
            elsewhere=np.where(self.gathers & self.is_resharded, self.block.whole * self.gather_bytes, 0.0),
        )

    def _end(self) -> Moment:
        """Return what the last block's backward adds: others have been freed and reduced."""
        # No block is left to gather ahead, and what stands outside of blocks is reduced after them.
        blocks = np.where(self.stays_gathered, self.all_blocks, self.block.whole)
        shards = np.where(self.reduces_last, 0.0, self._new_shards(self.in_blocks - self.block.shared))
        return self._moment(
            elsewhere=shards,
            unsharded_parameters_bytes=self._gathered(blocks) + self._own_gradients(is_end=True),
            gradients_bytes=shards,
            activations_bytes=np.max([block.all_kept_bytes for block in self.memory.blocks], axis=0),
            communication_buffers_bytes=self._reduced(),
            workspace_bytes=self.blocks.transient,
        )

    def _block_reduction(self) -> Moment:
        """Return what reducing the last block's gradients adds, when all other blocks' are reduced; of a pipeline that
        reduces once a step the first, when all gradients are whole: each block's then give way to its shards.
        """
        stay = (self.reduces_last & ~self.is_resharded) | self.stays_gathered
        reduced = np.where(self.reduces_last, self.block.shared, self.in_blocks)
        blocks, shards = np.where(stay, self.all_blocks, 0.0), self._new_shards(reduced)
        return self._moment(
            elsewhere=shards + self._divided(self.block),
            unsharded_parameters_bytes=self._gathered(blocks),
            gradients_bytes=shards + np.where(self.reduces_last, self.elements.whole * self.reduce_bytes, 0.0),
            communication_buffers_bytes=self._reduced() + self._divided(self.block),
        )

    def _last_reduction(self) -> Moment:
        """Return what reducing the gradients of what stands outside of blocks adds, when all others are reduced."""
        is_sum = self.accumulates & ~self.reduces_each
        own = self.copies * self.lasting.whole * np.where(is_sum, self.reduce_bytes, self.compute_bytes)
        gathered = np.where(self.stays_gathered, self._gathered(self.all_blocks), 0.0)
        shards, divided = self._new_shards(self.elements.shared), self._divided(self.lasting)
        return self._moment(
            elsewhere=shards + divided,
            unsharded_parameters_bytes=gathered + np.maximum(own, divided),
            gradients_bytes=shards,
            communication_buffers_bytes=self.copies * self.lasting.whole * self.reduce_bytes,
        )

    def _ends_reduction(self) -> Moment:
        """Return what reducing one microbatch's gradients of what stands outside of blocks adds, in a pipeline."""
        is_each = self.reduces_each & (self.memory.layouts.pp > 1) & self.is_sharded
        gathered = self._gathered(np.where(self.stays_gathered, self.all_blocks, 0.0))
        return self._moment(
            unsharded_parameters_bytes=is_each * (gathered + self.lasting.whole * self.compute_bytes),
            activations_bytes=is_each * self.kept.by_others,
            communication_buffers_bytes=is_each * ((self.lasting.whole - self.lasting_head.whole) * self.reduce_bytes)
            + self._retained(),
        )

    def _divided(self, unit: Elements) -> Floats:
        """Return what a reduction of `unit` on one rank adds: up to torch 2.14 FSDP2 divides into another tensor."""
        return np.where(self.memory.layouts.fsdp == 1, self.copies * unit.whole * self.reduce_bytes, 0.0)

    def _copied(self, unit: Elements) -> Floats:
        """Return the bytes of the copies of the host's shard of `unit` that a gather leaves behind: as it is kept, and
        in the format that is gathered.
        """
        return np.asarray(unit.shared * (self.bytes.shared_parameter + self.gather_bytes) * (1 - self.on_device))

    def _new_shards(self, elements: Floats) -> Floats:
        """Return the bytes of those gradient shards of `elements` that are not there before the end of a step."""
        return np.where(
            self.reduces_each | self.frees_gradients, 0.0, elements * self.bytes.shared_gradient * self.keeps_gradients
        )

    def reserved(self, moments: list[Moment]) -> Floats:
        """Return what the allocator reserves for all that comes and goes: a freed block serves its own stream only.

        FSDP2 gathers on one stream and reduces on another, so that the most of each adds up, whenever that is.
        """
        layouts = self.memory.layouts
        one_block = self.block.whole * self.gather_bytes
        # A pipeline gathers what it keeps before its first microbatch, on the stream that computes.
        is_concurrent = self.gathers & (self.is_resharded | (layouts.pp == 1))
        ends = self.lasting.maximum(self.after_blocks)
        copied_block, copied_ends = self._copied(self.block), self._copied(ends)
        of_blocks = copied_block + (self.num_gathered - 1) * one_block
        at_once = ends.whole * self.compute_bytes + np.maximum(of_blocks, copied_ends)
        ahead = np.where(is_concurrent, np.maximum(at_once, of_blocks + one_block), 0.0)
        shards = self._new_shards(self.elements.shared)
        # Where shards exist already, those of the next microbatch are made next to them and added, unit by unit.
        # Those that the host adds up are made on the device, too.
        unit = np.maximum(self.lasting.shared, self.block.shared) * self.bytes.shared_gradient
        reduced = np.where(
            self.reduces_each | ~self.keeps_gradients | self.frees_gradients, self.is_sharded * unit, shards
        )
        divided = self._divided(self.lasting.maximum(self.block))
        computing: list[Floats] = [total(moment.parts) - moment.elsewhere for moment in moments]
        # Logits that were freed leave a gap that is too narrow for what the loss makes of them. So do activations of
        # stages before the last, of which more are in flight between two losses: those that stay lie above the gaps.
        freed = self.is_last * self.memory.ends.freed_logits_bytes + self.kept.gaps
        computing[0] = computing[0] + freed + self.kept.most - self.kept.at_loss
        most: Floats = np.max(np.stack(computing), axis=0)
        gaps = FRAGMENTATION["expandable" if self.memory.setup.stack.expandable_segments else "fixed"]
        return np.asarray(most * (1 + gaps) + ahead + reduced + divided)

    def _moment(self, elsewhere: Floats | float = 0.0, **bytes_by_class: Floats) -> Moment:
        """Return the classes that come and go, those not given being 0 but for what is always there."""
        memory = self.memory
        zero = np.zeros(len(memory.layouts))
        names = (
            "unsharded_parameters_bytes",
            "gradients_bytes",
            "activations_bytes",
            "logits_bytes",
            "communication_buffers_bytes",
        )
        parts = {name: zero + bytes_by_class.get(name, 0.0) for name in names}
        # The sequence that tp ranks have gathered, or are about to share out.
        parts["communication_buffers_bytes"] += np.where(memory.layouts.tp > 1, memory.stream_bytes, 0.0)
        parts["workspace_bytes"] = zero + self.workspace_bytes + bytes_by_class.get("workspace_bytes", 0.0)
        return Moment(parts, zero + elsewhere)

    def _kept_copies(self, blocks: Floats) -> Floats:
        """Return the bytes of `blocks` that a rank keeps for its group from forward on (reshard_after_forward = n)."""
        kept_on = self.memory.layouts.kept_on
        return self.is_sharded * np.where(kept_on > 0, blocks * self.gather_bytes / np.maximum(kept_on, 1), 0.0)

    def _gathered(self, blocks: Floats) -> Floats:
        return self.copies * (self.lasting.whole * self.compute_bytes + blocks * self.gather_bytes)

    def _own_gradients(self, *, is_end: bool) -> Floats:
        """Return the bytes of a microbatch's gradients that are not reduced yet: of the block at work and the ends.

        After a backward in two parts all of a stage's are.
        """
        layouts, ends = self.memory.layouts, self.lasting if is_end else self.lasting_head
        stage = np.maximum(self.block.whole, self.all_blocks / layouts.stages_per_rank)
        blocks = np.where(self.reduces_each & layouts.splits_backward, stage, self.block.whole)
        return self.is_sharded * (ends.whole + blocks) * self.compute_bytes

    def _added_up(self) -> Floats:
        """Return the bytes of whole gradients that earlier microbatches left, beyond the activations that were freed
        for them since most chunks were in flight.
        """
        adds_up, layouts = self.accumulates & ~self.reduces_each & self.is_sharded, self.memory.layouts
        # The one published run with few rounds does not say its microbatch: other software keeps the simple rule.
        has_rounds = layouts.has_schedule(("Interleaved1F1B",)) & self.memory.setup.is_own
        in_rounds = np.where(has_rounds, self._added_in_rounds(), self.sums)
        return np.where(adds_up, np.where(runs_forwards_first(layouts), self._added_later(), in_rounds), 0)

    def _added_in_rounds(self) -> Floats:
        """Return the gradients of the stages that have some, beyond the chunks that were freed by then."""
        return np.asarray(np.max([self.sums * begun - freed * self.kept.chunk for begun, freed in self.rounds], axis=0))

    def _added_later(self) -> Floats:
        """Return what whole gradients take beyond what was freed for them, in the second backward of a rank's last
        stage or of its first: between, as many bytes come or go with each stage.
        """
        stages = self.memory.layouts.stages_per_rank
        of_stage = (self.all_blocks / stages + self.after_blocks.whole) * self.reduce_bytes
        of_last = of_stage - self.kept.chunk - self.kept.of_loss
        chunks = (stages - 1) * (self.kept.num_waiting + 1) + 1
        of_first = (
            self.sums - chunks * self.kept.chunk - np.where(stages > 1, self.kept.num_waiting, 1) * self.kept.of_loss
        )
        return np.asarray(np.maximum(of_last, of_first).clip(0))

    def _reduced(self) -> Floats:
        """Return the bytes of the gradients that a reduction reads: those of one block, in its format."""
        return self.copies * self.block.whole * self.reduce_bytes

    def _retained(self) -> Floats:
        """Return the bytes of the inputs of the last reduction of each of a rank's stages, which its next one frees.

        The last stage's is its root's, that of others their first block's; the first stage waits for its own.
        """
        layouts = self.memory.layouts
        holds = self.reduces_each & (layouts.pp > 1) & self.is_sharded
        between = layouts.stages_per_rank - self.is_first - self.is_last
        held = between * self.block.whole + self.is_last * self.lasting_head.whole
        return np.asarray(holds * held * self.reduce_bytes)

    def _reduced_next(self) -> Floats:
        """Return the bytes of the inputs of reductions while a stage's first block to have gradients is reduced."""
        reduced, retained = self._reduced(), self._retained()
        frees_own = (self.memory.layouts.stages_per_rank > 1) & (self.is_first > 0)
        return np.where(frees_own, reduced + retained, np.maximum(reduced, retained))


class HostRankFootprint(RankFootprint):
    """The same where kernels run on the host: its allocator has no pools of streams, and libraries no workspace."""

    workspace_bytes = 0

    def reserved(self, moments: list[Moment]) -> Floats:
        """Return the bytes of the moment that takes most."""
        return total(largest([moment.parts for moment in moments]))
