"""What FSDP2 does with a pipeline rank's parameters and gradients: gathers, sums and reduces, unit by unit.

FSDP2 keeps what stands outside of blocks gathered from forward to the end of backward, and the blocks too unless they
are freed after forward. Where gradients are reduced once a step, those of earlier microbatches add up whole, in the
format in which they are reduced; where each microbatch is reduced, their shards do. A pipeline's stage that sends
gradients to the one before holds the input of its last reduction until the next.
"""

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints
from meshwright.cost.memory.footprint_blocks import ModelMemory
from meshwright.cost.memory.footprint_rank_blocks import (
    blocks_of_rank,
    most_blocks_of_stage,
    rank_blocks,
    saved_activations,
)
from meshwright.cost.memory.footprint_stages import backward_rounds, runs_forwards_first
from meshwright.cost.memory.footprint_states import Elements, state_bytes
from meshwright.spec.step.workload import BYTES_PER_ELEMENT


class RankTensors:
    """Parameters and gradients of one pipeline rank by the unit that FSDP2 gathers, one element a layout."""

    def __init__(self, memory: ModelMemory, num_microbatches: Floats, pp_rank: Ints) -> None:
        self.memory, layouts, stack = memory, memory.layouts, memory.setup.stack
        self.is_first, self.is_last, counts = blocks_of_rank(memory, pp_rank)
        self.after_blocks = memory.ends.last * self.is_last
        self.outside = memory.ends.first * self.is_first + self.after_blocks
        self.is_graph = layouts.compiles_model
        """Whether the model is one graph, which gathers and reduces each parameter where it is used, on one stream."""
        self.is_captured = layouts.cuda_graphs & ~self.is_graph
        """Whether microbatches are CUDA graphs, without FSDP2: they cast gradients, and reduce nothing."""
        is_one_unit = ~self.is_graph & (not stack.shards_ends_apart)
        self.head = memory.ends.with_tied_head * self.is_last
        """What stands after the blocks, a tied head included, though its parameter is the embedding's."""
        self.lasting, self.lasting_head = self.outside * is_one_unit, self.head * is_one_unit
        """What stays gathered from forward to the end of backward, and what of it has gradients before the end."""
        self.blocks = rank_blocks(memory, counts, self.outside, pp_rank)
        self.elements, self.block = self.blocks.elements, self.blocks.largest
        self.all_blocks = self.elements.whole - self.outside.whole
        self.trained_blocks = self.elements.trained_whole - self.outside.trained_whole
        self.in_blocks = self.elements.trained_shared - self.outside.trained_shared
        """Shards of all gradients of theirs."""
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
        self.casts_sums = self.is_sharded and self.reduce_bytes > self.bytes.shared_gradient
        """Whether shards add up in a wider format than the optimizer reads: FSDP2 holds both at the end of backward."""
        self.sums = self.elements.trained_whole * self.reduce_bytes
        """Bytes of all gradients, whole."""
        num_ahead = np.minimum(layouts.prefetch, most_blocks_of_stage(memory, pp_rank) - 1)
        self.num_gathered = 1.0 + np.maximum(num_ahead, 1)
        """Blocks at work and gathered ahead; forward gathers one ahead anyway, since the host does not wait."""
        self.on_device = np.where(layouts.cpu_offload, 0.0, 1.0)
        # Replicas sum shards once a step, and FSDP2 keeps them on the device until then.
        self.keeps_gradients = ~layouts.cpu_offload | (layouts.dp_replicate > 1)

    def _sums_in_place(self) -> Bools:
        """Return where gradients are summed over replicas where they are."""
        layouts = self.memory.layouts
        return np.asarray(self.memory.setup.sums_in_place & layouts.is_replicated & ~layouts.compiles_model)

    def divided(self, unit: Elements) -> Floats:
        """Return what a reduction of `unit` on one rank adds: up to torch 2.14 FSDP2 divides into another tensor."""
        return np.where(self.memory.layouts.fsdp == 1, self.copies * unit.trained_whole * self.reduce_bytes, 0.0)

    def copied(self, unit: Elements) -> Floats:
        """Return the bytes of the copies of the host's shard of `unit` that a gather leaves behind: as it is kept, and
        in the format that is gathered.
        """
        return np.asarray(unit.shared * (self.bytes.shared_parameter + self.gather_bytes) * (1 - self.on_device))

    def new_shards(self, elements: Floats) -> Floats:
        """Return the bytes of those gradient shards of `elements` that are not there before the end of a step."""
        exist = (self.reduces_each & ~self.casts_sums) | self.frees_gradients
        return np.where(exist, 0.0, elements * self.bytes.shared_gradient * self.keeps_gradients)

    def kept_copies(self, blocks: Floats) -> Floats:
        """Return the bytes of `blocks` that a rank keeps for its group from forward on (reshard_after_forward = n)."""
        kept_on = self.memory.layouts.kept_on
        return self.is_sharded * np.where(kept_on > 0, blocks * self.gather_bytes / np.maximum(kept_on, 1), 0.0)

    def gathered(self, blocks: Floats) -> Floats:
        """Return the bytes of gathered parameters: what stands outside of blocks, and `blocks` elements of theirs."""
        # Microbatches that are graphs have no FSDP2: they cast what matmuls read, not what is looked up.
        lasting = np.where(self.memory.layouts.cuda_graphs, self.lasting_head.whole, self.lasting.whole)
        return np.asarray(self.copies * (lasting * self.compute_bytes + blocks * self.gather_bytes))

    def head_gradients(self) -> Floats:
        """Return the bytes of the head's gradients, which a microbatch has from its loss to the last reduction."""
        tied = self.head.trained_whole - self.after_blocks.trained_whole
        return self.is_sharded * np.where(self.is_graph, tied, self.lasting_head.trained_whole) * self.compute_bytes

    def captured_gradients(self) -> Floats:
        """Return the bytes of the embedding's gradients in CUDA graphs: as computed and cast; of a tied one the two
        that autograd adds to a third, all cast.
        """
        tied = self.lasting_head.trained_whole - self.after_blocks.trained_whole
        each = np.where(tied > 0, 3 * self.reduce_bytes, self.compute_bytes + self.reduce_bytes)
        return np.asarray(self.is_captured * self.copies * self.memory.ends.first.trained_whole * self.is_first * each)

    def graph_reduction(self) -> Floats:
        """Return the bytes of the gradients of a head that is not tied, which one graph reduces meanwhile, and of their
        shards.
        """
        shards = self.after_blocks.trained_shared * self.bytes.shared_gradient
        return np.asarray(self.is_graph * self.copies * (self.after_blocks.trained_whole * self.reduce_bytes + shards))

    def block_gradients(self) -> Floats:
        """Return the bytes of the gradients of the block at work; after a backward in two parts of all of a stage's."""
        layouts = self.memory.layouts
        stage = np.maximum(self.block.trained_whole, self.trained_blocks / layouts.stages_per_rank)
        blocks = np.where(self.reduces_each & layouts.splits_backward, stage, self.block.trained_whole)
        return np.asarray(self.is_sharded * blocks * self.compute_bytes)

    def added_up(self) -> Floats:
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
        of_stage = (self.trained_blocks / stages + self.after_blocks.trained_whole) * self.reduce_bytes
        of_last = of_stage - self.kept.chunk - self.kept.of_loss
        chunks = (stages - 1) * (self.kept.num_waiting + 1) + 1
        of_first = (
            self.sums - chunks * self.kept.chunk - np.where(stages > 1, self.kept.num_waiting, 1) * self.kept.of_loss
        )
        return np.asarray(np.maximum(of_last, of_first).clip(0))

    def reduced(self) -> Floats:
        """Return the bytes of the gradients that a reduction reads: those of one block, in its format."""
        return self.copies * self.block.trained_whole * self.reduce_bytes

    def retained(self) -> Floats:
        """Return the bytes of the inputs of the last reduction of each of a rank's stages, which its next one frees.

        The last stage's is its root's, that of others their first block's; the first stage waits for its own.
        """
        layouts = self.memory.layouts
        holds = self.reduces_each & (layouts.pp > 1) & self.is_sharded
        between = layouts.stages_per_rank - self.is_first - self.is_last
        held = between * self.block.trained_whole + self.is_last * self.lasting_head.trained_whole
        return np.asarray(holds * held * self.reduce_bytes)

    def reduced_next(self) -> Floats:
        """Return the bytes of the inputs of reductions while a stage's first block to have gradients is reduced."""
        reduced, retained = self.reduced(), self.retained()
        frees_own = (self.memory.layouts.stages_per_rank > 1) & (self.is_first > 0)
        return np.where(frees_own, reduced + retained, np.maximum(reduced, retained))
