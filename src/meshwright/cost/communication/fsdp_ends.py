"""What of FSDP's gathers and reductions is exposed at the ends of a pass: around the first and the last block.

    forward    the first block is gathered behind what stands before it, not behind a block
    backward   the last block is gathered behind the loss, so that next to its own backward the block before it is
               gathered and nothing is reduced; next to the first block's nothing is gathered, and its gradients are
               reduced behind what stands before it, and summed over replicas next to the reduction of that
    ends       what stands before and after the blocks is cast, gathered and reduced at the ends of a pass: all exposed

Source: the order of FSDP2's own calls, on simulated steps of torch 2.13, 2026-11-27. Not in a pipeline, whose stages
gather ahead and reduce when all of a stage is done. Ignored: copies that a group of ranks keeps of experts.
"""

import numpy as np

from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.cost.communication.data_parallel import (
    DataParallel,
    block_collectives_s,
    dense_parameters,
    trained_dense_parameters,
)
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.fsdp_exposed import (
    UnitExchanges,
    UnitPasses,
    backward_exposed_s,
    exposed_s,
    gathers_in_line,
)
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats, Ints, Passes
from meshwright.cost.memory.host_memory import copy_s, sums_on_host


def pass_ends_exposed_s(
    dp: DataParallel, row: Ints, fabric: Fabric, c: Constants, passes: UnitPasses, ends: Passes
) -> Floats:
    """Return the seconds, for one microbatch, by which the first and the last block expose more than others, which is
    less than nothing where the loss hides a gather that no block would.

    `ends` are the seconds of what stands before the blocks, forward and backward. 0 of other software, whose
    multipliers were fitted to whole steps without it.
    """
    layouts = dp.layouts
    # Experts on ranks of their own are a unit within their block, which hides behind the rest of it.
    is_one_unit = (layouts.ep == 1) & (layouts.tp == 1)
    own = block_collectives_s(dp, row, fabric, with_experts=is_one_unit)
    unit = UnitExchanges(dp, row, fabric, passes)
    forward = _first_gather_s(dp, unit, own[0], c, passes, ends[0])
    backward = _backward_ends_s(dp, unit, own, c, passes, ends[1])
    is_alone = dp.shards_parameters & dp.is_own & (layouts.dp * layouts.cp > 1) & (layouts.pp == 1)
    return np.where(is_alone, forward + backward, 0.0)


def _first_gather_s(
    dp: DataParallel, unit: UnitExchanges, gather_s: Floats, c: Constants, passes: UnitPasses, before_s: Floats
) -> Floats:
    """Return by how much longer the first block's gather is exposed, which hides behind `before_s`, not a block."""
    first, usual = (
        exposed_s(gather_s, behind_s, c, unit.slows, unit.prepared) for behind_s in (before_s, passes.whole[0])
    )
    gathers = np.where(dp.layouts.is_resharded, 1.0, 1.0 / dp.num_microbatches)
    return np.asarray(gathers * np.maximum(first - usual, 0.0))


def _backward_ends_s(
    dp: DataParallel, unit: UnitExchanges, own: Passes, c: Constants, passes: UnitPasses, before_s: Floats
) -> Floats:
    """Return the seconds by which the backwards of the last and the first block, and the first one's reduction, which
    hides behind `before_s`, expose more than two other blocks.
    """
    layouts, last = dp.layouts, 1.0 / dp.num_microbatches
    computes, (gather_s, scatter_s) = passes.computing[1] * unit.slows, own

    def exposed(one: UnitExchanges) -> Floats:
        usual, at_end = backward_exposed_s(dp, one, c, passes.whole[1], computes)
        return np.asarray((1 - last) * usual + last * at_end)

    last_block, first_block = unit.without_reduction(scatter_s), unit.without_gather(gather_s)
    both = exposed(last_block) + exposed(first_block) - 2 * exposed(unit)
    only = exposed(last_block.without_gather(gather_s)) - exposed(unit)
    behind = exposed_s(scatter_s, before_s, c, unit.slows)
    # The host waits for each microbatch's gradients to add them.
    usual = np.where(sums_on_host(layouts), scatter_s + unit.copied_out, behind)
    after = (1 - last) * layouts.reduces_each_microbatch * usual + last * (behind + unit.summed_alone)
    # Without prefetch blocks are priced one by one.
    return np.where(gathers_in_line(layouts), 0.0, after + np.where(dp.num_blocks > 1, both, only))


def ends_exposed_s(dp: DataParallel, row: Ints, fabric: Fabric, before_gather_s: Floats) -> Floats:
    """Return the seconds, for one microbatch, of gathering what stands before or after the blocks, `before_gather_s`
    of them to prepare it, and reducing its gradients: at the ends of a pass there is nothing to hide them behind.
    """
    layouts, parameters = dp.layouts, dense_parameters(dp, row)
    group, replicas = dp.shard_group(fabric), dp.replica_group(fabric)
    whole = before_gather_s + all_gather_s(parameters * dp.element_bytes, group, fabric)
    trained = trained_dense_parameters(dp, row)
    scatter, summed = (
        np.where(trained > 0, seconds, 0.0)
        for seconds in (
            reduce_scatter_s(trained * dp.reduce_bytes, group, fabric),
            all_reduce_s(trained / layouts.fsdp * dp.reduce_bytes, replicas, fabric),
        )
    )
    last = 1.0 / dp.num_microbatches
    # Kept from forward to backward, but for one microbatch only if blocks are freed.
    gathers = np.where(layouts.is_resharded, 1.0, last)
    reduces = np.where(layouts.reduces_each_microbatch, 1.0, last)
    copied = gathers * copy_s(layouts, parameters / layouts.fsdp)
    copied = copied + np.where(sums_on_host(layouts), 1.0, last) * copy_s(layouts, trained / layouts.fsdp)
    return np.where(dp.shards_parameters, gathers * whole + reduces * scatter + last * summed + copied, 0.0)
