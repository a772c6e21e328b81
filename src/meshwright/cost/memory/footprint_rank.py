"""The memory of one pipeline rank at the moment of a step when it has the least to spare.

    forward    the first block's parameters are copied out of their all-gather: FSDP2 still holds the one before it, of
               what stands outside of blocks; the peak where little is trained (adapters) and logits come in chunks
    loss       all kept activations, logits and what the loss makes of them; in chunks of tokens, one chunk's and the
               gradients of the head
    backward   the first block's gradients are reduced, the second is at work: it is recomputed, or has its gradients;
               its parameters are gathered, and those of the next; all other activations are kept, and those of two
               blocks on the device where they wait on the host
    ends       a pipeline reduces a microbatch's gradients of what stands outside of blocks: the activations of that
               microbatch and stage are freed
    last       what stands outside of blocks is reduced, when all else is: whole gradients, and what the reduction reads
    end        the activations of one block, the gradients of all others but the embedding: the peak where one
               microbatch is all, since sharded gradients then grow as activations go
    reduction  the last block's gradients are reduced, what only its backward needed is freed, and the embedding has
               its gradient
    update     AdamW in bfloat16 (ours) has float32 copies and random bits of the parameters that it updates at once,
               next to all gradients

What a rank needs is the fullest moment, with the gaps in the allocator that it cannot but have. Others it caches as
long as the device has room (footprint_rank_gaps.py): at its limit torch's allocator gives them back.
"""

from typing import NamedTuple

import numpy as np

from meshwright.cost.layout_table import Floats
from meshwright.cost.memory.footprint_constants import WORKSPACE_BYTES
from meshwright.cost.memory.footprint_rank_gaps import Moment, Parts, RankGaps, largest, total

_UPDATED_AT_ONCE = float(1 << 24)
"""Elements (trainer/optimizer/bfloat16_adamw.py)."""
_UPDATE_COPIES_BYTES = 26.0
"""Of an element that it updates: two moments in float32, one of them rounded, bits and noise; counted in a trace."""


class AtWork(NamedTuple):
    """Bytes of the block whose backward runs."""

    activations: Floats
    transient: Floats
    gradients: Floats
    freed: Floats
    """Of these at another moment of it."""


class RankFootprint(RankGaps):
    """What one pipeline rank of an accelerator holds."""

    workspace_bytes = 2 * WORKSPACE_BYTES
    """Of libraries, throughout a step."""

    def parts(self) -> Parts:
        """Return the bytes by tensor class when the rank has the least to spare, but context_bytes."""
        states = self._states()
        moments = [self._forward(), self._loss(), self._backward(), self._end(), self._block_reduction()]
        moments += [self._last_reduction(), self._ends_reduction(), self._update()]
        parts = largest([moment.parts for moment in moments])
        needed, cached = self.reserved(moments)
        fragmentation = needed - total(parts)
        parts["gradients_bytes"] = parts["gradients_bytes"] + states.pop("gradients_bytes")
        parts = states | parts | {"fragmentation_bytes": fragmentation}
        room = self.memory.setup.cluster.device.usable_memory_bytes - total(parts)
        return parts | {"cached_bytes": np.minimum(cached, room).clip(0)}

    def _states(self) -> Parts:
        """Return what stays allocated throughout a step."""
        whole, shared, size = self.elements.whole, self.elements.shared * self.on_device, self.bytes
        setup, ends = self.memory.setup, self.memory.ends
        # Managed memory (memory.* = "uvm") is the host's.
        embedding = ends.embedding(self.is_first, self.is_last) * setup.pools_embedding * self.on_device
        stays = float(not setup.pools_optimizer_state)
        # Shards of gradients exist before the end of a step only where every microbatch is reduced, in the format of
        # reductions where that is wider.
        summed = self.reduce_bytes if self.casts_sums else size.shared_gradient
        shards = self.elements.trained_shared * summed * (self.reduces_each & self.keeps_gradients)
        trained, narrow = self.elements.trained_shared * self.on_device, self.elements.narrow_shared * self.on_device
        narrow_bytes = self.elements.narrow_shared_bytes * self.on_device
        if not self.is_sharded:
            narrow, narrow_bytes = self.elements.narrow_whole, self.elements.narrow_whole_bytes
        # One of the two formats is 0.
        narrow_bytes = narrow_bytes - narrow * (size.whole_parameter + size.shared_parameter)
        # What Muon and 8 bits save is in the matrices of blocks.
        saved = self.blocks.matrices * self.on_device * (size.shared_optimizer - size.shared_matrix_optimizer)
        return {
            "parameters_bytes": whole * size.whole_parameter
            + (shared - embedding) * size.shared_parameter
            + narrow_bytes,
            "gradients_bytes": self.elements.trained_whole * size.whole_gradient + shards,
            "optimizer_state_bytes": stays * (trained * size.shared_optimizer - saved),
        }

    def _forward(self) -> Moment:
        """Return what the forward of the first block adds when its parameters are copied out of what was gathered.

        FSDP2 frees the output of an all-gather when that of the next one has been copied out.
        """
        has_outputs = self.gathers & ~self.is_graph & ~self.memory.layouts.cuda_graphs
        outputs = has_outputs * (self.lasting.whole * self.compute_bytes + self.block.whole * self.gather_bytes)
        return self._moment(
            unsharded_parameters_bytes=self.gathered(self.block.whole),
            activations_bytes=np.where(self.memory.layouts.tp > 1, 0.0, self.memory.stream_bytes),
            communication_buffers_bytes=outputs,
            elsewhere=outputs,
        )

    def _loss(self) -> Moment:
        """Return what the last stage adds while it computes the loss; others have nothing to compute there."""
        return self._moment(
            unsharded_parameters_bytes=self.gathered(np.where(self.is_resharded, 0.0, self.all_blocks))
            + self.kept_copies(self.all_blocks)
            + self.is_sharded * (self.head.whole - self.lasting.whole).clip(0) * self.compute_bytes
            + self.is_last * self.memory.ends.early_gradients_bytes,
            gradients_bytes=self.added_up(),
            activations_bytes=self.kept.at_loss,
            logits_bytes=self.is_last * self.memory.ends.logits_bytes,
            communication_buffers_bytes=self.retained(),
            # Logits that were freed leave a gap that is too narrow for what the loss makes of them. So do activations
            # of stages before the last, of which more are in flight between two losses: those that stay lie above.
            gaps=self.logits_gap() + self.kept.gaps + self.kept.most - self.kept.at_loss,
            cached=self.is_last * self.gaps_of_window(),
        )

    def _backward(self) -> Moment:
        """Return what the backward of a rank's second block adds, while the first one's gradients are reduced; that of
        the first, if its activations are more than what the reduction reads and writes.
        """
        # Blocks that are gathered while one computes, where the others are freed.
        few_blocks = np.minimum(self.num_gathered * self.block.whole, self.all_blocks)
        gathered = np.where(self.is_resharded, few_blocks, self.all_blocks)
        reduced, kept = np.where(self.reduces_last, 0.0, self.reduced_next()), self.blocks.least_kept
        shards = ~self.accumulates * self.new_shards(self.block.trained_shared)
        is_second = (reduced + shards > kept) & (self.all_blocks > self.block.whole)
        freed, in_reduction = is_second * kept, np.where(is_second, reduced, self.retained())
        at_work = self._at_work(kept + self.blocks.recomputed)
        shards = is_second * shards
        ahead = np.where(self.gathers & self.is_resharded, self.block.whole * self.gather_bytes, 0.0)
        return self._moment(
            unsharded_parameters_bytes=self.gathered(gathered)
            + self.kept_copies(self.all_blocks - few_blocks)
            + self.head_gradients()
            + at_work.gradients,
            gradients_bytes=self.added_up() + shards,
            activations_bytes=self.kept.most + self.blocks.window - freed - kept + at_work.activations,
            communication_buffers_bytes=in_reduction + self.graph_reduction(),
            workspace_bytes=at_work.transient,
            elsewhere=ahead + shards,
            # A reduction reads one tensor, which is wider than what one block's backward has freed by then.
            gaps=freed + reduced - in_reduction + at_work.freed,
        )

    def _end(self) -> Moment:
        """Return what the last block's backward adds: others have been freed and reduced."""
        # No block is left to gather ahead, and what stands outside of blocks is reduced after them.
        blocks = np.where(self.stays_gathered, self.all_blocks, self.block.whole)
        shards = np.where(self.reduces_last, 0.0, self.new_shards(self.in_blocks - self.block.trained_shared))
        at_work = self._at_work(np.max([block.all_kept_bytes for block in self.memory.blocks], axis=0))
        return self._moment(
            elsewhere=shards,
            unsharded_parameters_bytes=self.gathered(blocks) + self.head_gradients() + at_work.gradients,
            gradients_bytes=shards,
            activations_bytes=at_work.activations,
            communication_buffers_bytes=self.reduced(),
            workspace_bytes=at_work.transient,
            gaps=at_work.freed,
        )

    def _at_work(self, held: Floats) -> AtWork:
        """Return what the block at work has besides parameters at its fullest, which has `held` activations at first:
        its gradients come as these go. A backward in two parts lets go of them at its end.
        """
        transient, gradients = self.blocks.transient, self.block_gradients()
        has_all = self.memory.layouts.splits_backward
        is_late = (gradients > held + transient) & ~has_all
        is_early = ~is_late & ~has_all
        return AtWork(
            activations=np.where(is_late, 0.0, held),
            transient=np.where(is_late, 0.0, transient) + self.blocks.low_copies,
            gradients=np.where(is_early, 0.0, gradients),
            # Copies of operands, a tensor each, fit into what was freed.
            freed=(is_late * (held + transient) + is_early * gradients - self.blocks.low_copies).clip(0),
        )

    def _block_reduction(self) -> Moment:
        """Return what reducing the last block's gradients adds, when all other blocks' are reduced and those of the
        embedding exist; of a pipeline that reduces once a step the first block's, when all gradients are whole: each
        block's then give way to its shards.
        """
        stay = (self.reduces_last & ~self.is_resharded) | self.stays_gathered
        reduced = np.where(self.reduces_last, self.block.trained_shared, self.in_blocks)
        blocks, shards = np.where(stay, self.all_blocks, 0.0), self.new_shards(reduced)
        # Autograd adds the two gradients of a tied embedding to a third tensor.
        tied = self.lasting_head.trained_whole - self.after_blocks.trained_whole
        own = self.is_sharded * (self.lasting.trained_whole + 2 * tied.clip(0)) * self.compute_bytes
        return self._moment(
            elsewhere=shards + self.divided(self.block),
            unsharded_parameters_bytes=self.gathered(blocks) + np.where(self.memory.layouts.pp > 1, 0.0, own),
            gradients_bytes=shards + np.where(self.reduces_last, self.elements.trained_whole * self.reduce_bytes, 0.0),
            communication_buffers_bytes=self.reduced() + self.divided(self.block),
        )

    def _last_reduction(self) -> Moment:
        """Return what reducing the gradients of what stands outside of blocks adds, when all others are reduced."""
        is_sum = self.accumulates & ~self.reduces_each
        last = (self.lasting + self.memory.ends.first * self.is_first * self.is_graph) * ~self.is_captured
        own = self.copies * last.trained_whole * np.where(is_sum, self.reduce_bytes, self.compute_bytes)
        gathered = np.where(self.stays_gathered, self.gathered(self.all_blocks), 0.0)
        shards, divided = self.new_shards(self.elements.trained_shared), self.divided(last)
        # Whole gradients are copied into what the reduction reads, and freed before their shards are made.
        freed = np.minimum(own, self.new_shards(last.trained_shared))
        read = self.copies * last.trained_whole * self.reduce_bytes
        # What is reduced is made next to the sums that it is added to, and cast.
        wide = self.casts_sums * self.reduces_each * last.trained_shared * self.reduce_bytes
        return self._moment(
            elsewhere=shards + divided,
            unsharded_parameters_bytes=gathered + np.maximum(own - freed, divided) + self.captured_gradients(),
            gradients_bytes=shards + wide,
            communication_buffers_bytes=read,
            gaps=freed,
            cached=(self.below_last_input(read) - own - freed).clip(0),
        )

    def _ends_reduction(self) -> Moment:
        """Return what reducing one microbatch's gradients of what stands outside of blocks adds, in a pipeline."""
        is_each = self.reduces_each & (self.memory.layouts.pp > 1) & self.is_sharded
        gathered = self.gathered(np.where(self.stays_gathered, self.all_blocks, 0.0))
        return self._moment(
            unsharded_parameters_bytes=is_each * (gathered + self.lasting.trained_whole * self.compute_bytes),
            activations_bytes=is_each * self.kept.by_others,
            communication_buffers_bytes=is_each
            * ((self.lasting.trained_whole - self.lasting_head.trained_whole) * self.reduce_bytes)
            + self.retained(),
        )

    def _update(self) -> Moment:
        """Return what an update of bfloat16 states adds: of a large tensor, or of as many small ones as fit a chunk."""
        workload = self.memory.setup.workload
        if not (self.memory.setup.is_own and workload.optimizer_state_dtype == "bfloat16"):
            return self._moment()
        others = self.elements.trained_shared - self.blocks.matrices * (workload.optimizer == "muon")
        of_ends = np.maximum(self.memory.ends.first.trained_shared * self.is_first, self.after_blocks.trained_shared)
        at_once = np.maximum(of_ends, np.minimum(others, _UPDATED_AT_ONCE)) * self.on_device
        shards = self.new_shards(self.elements.trained_shared)
        return self._moment(elsewhere=shards, gradients_bytes=shards, workspace_bytes=at_once * _UPDATE_COPIES_BYTES)

    def _moment(
        self,
        elsewhere: Floats | float = 0.0,
        gaps: Floats | float = 0.0,
        cached: Floats | float = 0.0,
        **bytes_by_class: Floats,
    ) -> Moment:
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
        return Moment(parts, zero + elsewhere, zero + gaps, zero + cached)


class HostRankFootprint(RankFootprint):
    """The same where kernels run on the host: its allocator has no pools of streams, and libraries no workspace."""

    workspace_bytes = 0

    def reserved(self, moments: list[Moment]) -> tuple[Floats, Floats]:
        """Return the bytes of the moment that takes most, and that nothing is cached."""
        most = total(largest([moment.parts for moment in moments]))
        return most, np.zeros_like(most)
