"""What of FSDP's gathers and reductions computation does not hide.

    forward    exposed = max(block, gather) - block + slowdown x the shorter of the two x the share of the block in
               which the device computes (1 of other software)
    backward   the same of gather, if blocks are freed, and reduction, which one communicator runs one by one; where a
               group of ranks has kept a copy, or reductions have a group of their own, both run at once: the longer
               + (load - 1) x the shorter (contention.py)
    prefetch   with none a block is gathered when the one after it is reduced, and neither hides; forward gathers ahead
               anyway, since the host does not wait for the device
    replicas   sums over replicas run on a stream of their own, next to what FSDP exchanges for the next block: the
               longer + (load - 1) x the bytes' seconds of the shorter
    float8     weights are rounded before they are gathered, next to computation: both hide together
    offload    parameters are copied to the device next to the gather of the block before, gradients to the host next
               to the next gather; all but the first microbatch's are added to those on the host, which waits for them
    one graph  (layout.compile = "model") the same, but sums of several microbatches over replicas follow the last: all
               exposed

Ends of a pass: fsdp_ends.py. Kept parameters travel once a step, gradients once a step or after each microbatch
(Layout.gradient_sync). After a backward in two parts they are reduced unit by unit, and nothing hides it. Sources: FSDP
(arXiv:2304.11277), Galvatron (arXiv:2211.13878) for the slowdown; the order of FSDP2's own calls for prefetch and
offload. Ignored: what prefetch of more than one block hides besides; that copies take bandwidth from collectives within
a node.
"""

from copy import copy
from typing import NamedTuple, Self

import numpy as np

from meshwright.cost.communication.collective import all_reduce_s, slowdown_share
from meshwright.cost.communication.contention import joint_load, ring_shares
from meshwright.cost.communication.data_parallel import (
    DataParallel,
    block_collectives_s,
    gather_again_s,
    replicas_all_reduce_s,
)
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, Passes
from meshwright.cost.memory.host_memory import copy_s, sums_on_host


class UnitPasses(NamedTuple):
    """One block's passes of one microbatch, which hide its exchanges; seconds, forward and backward."""

    whole: Passes
    """Of our own software with fsdp_copies_s."""
    computing: Passes
    """Shares of them in which the device computes, which is what communication slows down."""
    before_gather_s: Floats
    """Of making its shards ready for a gather, next to computation."""
    after_reduction_s: Floats
    """Of adding up what was reduced, next to computation."""


class UnitExchanges:
    """The seconds of one block's exchanges, none hidden, one element a configuration."""

    def __init__(self, dp: DataParallel, row: Ints, fabric: Fabric, passes: UnitPasses) -> None:
        layouts = dp.layouts
        self.gather, self.scatter = block_collectives_s(dp, row, fabric)
        replicas, self.summed = replicas_all_reduce_s(dp, row, fabric)
        """Of summing its gradient shards over replicas."""
        kept, from_kept = gather_again_s(dp, row, fabric)
        shards = dp.shard_group(fabric)
        self.is_freed = layouts.is_resharded & ((layouts.fsdp > 1) | _shares_experts(dp, row))
        is_kept = layouts.kept_on > 0
        self.again: Floats = np.where(self.is_freed, np.where(is_kept, from_kept, self.gather), 0.0)
        """Of gathering it for backward; 0 where it is not freed."""
        self.copied = copy_s(layouts, dp.shard(row))
        """Of copying its parameters to the device."""
        self.copied_out = copy_s(layouts, dp.trained_shard(row))
        """Of copying its gradients to the host."""
        self.prepared, self.added = passes.before_gather_s, passes.after_reduction_s
        # What a group keeps is on the device, and as it was gathered.
        self.copied_again: Floats = np.where(self.is_freed & ~is_kept, self.copied, 0.0)
        self.prepared_again: Floats = np.where(self.is_freed & ~is_kept, self.prepared, 0.0)
        load = joint_load(ring_shares(kept, fabric), ring_shares(shards, fabric), fabric) if is_kept.any() else 2.0
        own = layouts.separate_reduce_group & ~is_kept
        own_load = joint_load(ring_shares(shards, fabric), ring_shares(shards, fabric), fabric) if own.any() else 2.0
        self.load: Floats = np.where(is_kept, load, np.where(own, own_load, 2.0))
        """Of the links that it is gathered again over next to a reduction; 2 where one waits for the other."""
        self.slows = slowdown_share(shards, fabric)
        """By how much less they slow down computation than usual (layout.communication_sms)."""
        sums_load = joint_load(ring_shares(replicas, fabric), ring_shares(shards, fabric), fabric)
        waiting_s = np.minimum(all_reduce_s(0.0, replicas, fabric), self.summed)
        self.summed_alone: Floats = np.where(dp.is_own, (sums_load - 1) * (self.summed - waiting_s), self.summed)
        """Of summing it over replicas those by which this delays what FSDP2 exchanges at the same time."""

    def without_gather(self, gather_s: Floats) -> Self:
        """Return the same of a block next to whose backward `gather_s` less is gathered: its dense parameters."""
        left = copy(self)
        left.again = np.where(self.is_freed, np.maximum(self.again - gather_s, 0.0), 0.0)
        left.copied_again = left.prepared_again = np.zeros_like(self.again)
        return left

    def without_reduction(self, scatter_s: Floats) -> Self:
        """Return the same of a block next to whose backward `scatter_s` less is reduced."""
        left = copy(self)
        left.scatter = np.maximum(self.scatter - scatter_s, 0.0)
        left.copied_out = left.added = left.summed = left.summed_alone = np.zeros_like(self.scatter)
        return left


def fsdp_exposed_s(
    dp: DataParallel,
    row: Ints,
    fabric: Fabric,
    c: Constants,
    passes: UnitPasses,
) -> Floats:
    """Return the seconds of exposed communication that FSDP adds to one block's passes of one microbatch."""
    layouts, last = dp.layouts, 1.0 / dp.num_microbatches
    unit, block = UnitExchanges(dp, row, fabric, passes), passes.whole
    computes = passes.computing[0] * unit.slows, passes.computing[1] * unit.slows
    # Shares of microbatches: what is freed is gathered for each, what is kept for one.
    gathered = np.where(unit.is_freed, 1.0, last)
    forward = gathered * exposed_s(np.maximum(unit.gather, unit.copied), block[0], c, computes[0], unit.prepared)
    usual, at_end = backward_exposed_s(dp, unit, c, block[1], computes[1])
    is_shared = (layouts.dp * layouts.cp > 1) | _shares_experts(dp, row) | layouts.cpu_offload
    exposed = forward + (1 - last) * usual + last * at_end
    return np.where(dp.shards_parameters & is_shared, exposed, 0.0)


def _shares_experts(dp: DataParallel, row: Ints) -> Bools:
    """Return where ranks that share their tokens, by tp alone, still share out experts (ours)."""
    return np.asarray(dp.is_own & (dp.layouts.expert_dp_shard > 1) & (dp.work.blocks.expert_parameters[row] > 0))


def backward_exposed_s(
    dp: DataParallel, unit: UnitExchanges, c: Constants, block_s: Floats, computes: Floats
) -> Passes:
    """Return the seconds exposed in one block's backward, of the usual microbatch and of the one whose gradients are
    left to reduce at the end of a step, or are the first that the host gets.
    """
    layouts = dp.layouts
    # Sums over replicas, which follow the last microbatch, are of what the device holds.
    copied_out = np.where(layouts.dp_replicate == 1, unit.copied_out, 0.0)
    behind = np.where(layouts.splits_backward, 0.0, block_s)
    after_stage = _hidden_after_stage(dp, unit, unit.scatter + copied_out, block_s, c)
    gathered = exposed_s(unit.again + unit.copied_again, block_s, c, computes, unit.prepared_again)
    reduced = exposed_s(_at_once(unit, copied_out), behind, c, computes) - after_stage
    exchanged = _at_once(unit, unit.copied_out)
    both = np.maximum(exchanged + unit.summed_alone, unit.summed)
    # Nothing is computed after the stage that a rank is done with last.
    at_end = exposed_s(both, behind, c, computes) - (1 - 1 / layouts.stages_per_rank) * after_stage
    in_line = unit.is_freed & gathers_in_line(layouts)
    # A stage's last block is gathered behind the loss, or behind another microbatch.
    waited = unit.again * (1 - _last_of_stage(dp)) + unit.scatter
    reduced = np.where(in_line, waited, reduced)
    at_end = np.where(in_line, waited + exposed_s(unit.summed, block_s, c, computes), at_end)
    # The device waits for the host, which waits for gradients to add them.
    gathered = np.where(in_line & sums_on_host(layouts), unit.again + unit.copied_again, gathered)
    usual = np.where(layouts.reduces_each_microbatch, reduced, gathered)
    usual = np.where(sums_on_host(layouts), gathered + unit.scatter + unit.copied_out, usual)
    # A model's graph is the same for each microbatch: their sum is reduced over replicas when the last one is done.
    after_all = layouts.compiles_model & (dp.num_microbatches > 1)
    return usual, np.where(after_all, usual + unit.summed, at_end)


def _at_once(unit: UnitExchanges, copied_out: Floats) -> Floats:
    """Return the seconds between the exchanges of one block's backward and those of the next, if nothing else waits.

    Copies run next to the other collective, but before the block's own gather and after its own reduction; so does what
    rounds its shards, and what adds up what was reduced.
    """
    shorter, longer = np.minimum(unit.again, unit.scatter), np.maximum(unit.again, unit.scatter)
    gathered, reduced = unit.again + unit.copied_again + unit.prepared_again, unit.scatter + unit.added + copied_out
    with_copies = np.maximum(gathered, reduced)
    return np.maximum(longer + (unit.load - 1) * shorter, with_copies)


def gathers_in_line(layouts: LayoutTable) -> Bools:
    """Return where a freed block is gathered again only after the reduction of the one that backward does before it.

    FSDP2 calls both on the same communicator; groups that keep a copy have one of their own.
    """
    return np.asarray(layouts.is_resharded & (layouts.prefetch == 0) & (layouts.kept_on == 0))


def _last_of_stage(dp: DataParallel) -> Floats:
    """Return the share of blocks that are the last of their stage."""
    return np.minimum(dp.layouts.num_stages / dp.num_blocks, 1.0)


def _hidden_after_stage(
    dp: DataParallel, unit: UnitExchanges, scatter: Floats, backward_s: Floats, c: Constants
) -> Floats:
    """Return the seconds of a block's reduction that hide where a backward has two parts, in the mean over blocks.

    A stage reduces its blocks one by one when its backward is done. The last one hides behind what is computed next,
    which is at least the backward to the weights of another stage.
    """
    last_of_stage = _last_of_stage(dp)
    weights_s = backward_s / 2 / last_of_stage
    hidden_s = scatter - exposed_s(scatter, weights_s, c, unit.slows)
    return np.where(dp.layouts.splits_backward, last_of_stage * hidden_s, 0.0)


def exposed_s(
    own_s: Floats, hidden_behind_s: Floats, c: Constants, computes: Floats, prepared_s: Floats | float = 0.0
) -> Floats:
    """Return the exposed seconds of a collective that follows `prepared_s`, in which it slows down nothing."""
    longer_by_s = np.maximum(prepared_s + own_s - hidden_behind_s, 0)
    return np.asarray(longer_by_s + c["overlap_slowdown"] * computes * np.minimum(own_s, hidden_behind_s))
