"""DataParallel: gathering parameters, reducing gradients, and what of it computation hides.

    FSDP     each block: exposed = max(block, communication) - block + slowdown x the shorter of the two x the share of
             the block in which the device computes (1 of other software); forward gathers, backward gathers again (if
             resharded) and scatters; the ends of the step are exposed
    ZeRO-1   gradients scattered and parameters gathered once a step, hidden behind the last microbatch but for a share
             unless backward adds to them itself, each microbatch's gradients are added to whole ones, or copied into
             the input of a reduce-scatter of their own
    HSDP     one all-reduce of each gradient shard over the replicas besides, once a step
    tp       gradients of what its ranks all hold whole (norms, routers) are summed over them once a step, since each
             has seen its part of the sequence

Sources: FSDP (arXiv:2304.11277), ZeRO (arXiv:1910.02054), Galvatron (arXiv:2211.13878) for the slowdown. Kept
parameters travel once a step, gradients once a step or after each microbatch (Layout.gradient_sync). After a backward
in two parts they are reduced unit by unit, and nothing hides it. Ignored: dim-0 padding of shards; prefetch of more
than one block; copies on groups of n ranks (reshard_after_forward = n), gathered as from all of them; casts of shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.case import Cases, Floats
from meshwright.cost.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.cost.constants import Constants
from meshwright.cost.fabric import Fabric
from meshwright.cost.group import Group, group_of
from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.offload import copy_s, sums_on_host
from meshwright.cost.work import BLOCK, Work

Index = NDArray[np.int64]


@dataclass(frozen=True)
class DataParallel:
    """One element a case."""

    layouts: LayoutTable
    work: Work
    shards_parameters: NDArray[np.bool_]
    overlaps: NDArray[np.bool_]
    fuses_sum: NDArray[np.bool_]
    """Whether backward itself adds a microbatch's gradients to those before it."""
    element_bytes: Floats
    gather_bytes: Floats
    """Bytes of a parameter that is gathered."""
    reduce_bytes: Floats
    """Bytes of a gradient that is reduced."""
    dense_parameters: Floats
    """Of the fullest rank, before data-parallel ranks share them."""
    expert_parameters: Floats
    replicated_parameters: Floats
    """Those of dense_parameters that tp does not divide, where its ranks share the sequence between matmuls."""
    updated: Floats
    """Parameters that one rank updates."""
    is_own: NDArray[np.bool_]
    """Whether the software is our own trainer."""
    num_microbatches: Floats
    num_blocks: Floats
    """Of the model."""


def data_parallel_of(cases: Cases, work: Work) -> DataParallel:
    """Return what data-parallel ranks hold and exchange."""
    layouts, owners = cases.layouts, work.owners
    is_block = owners.kind == BLOCK

    def per_key(values: Floats, mask: NDArray[np.bool_]) -> Floats:
        total = np.bincount(owners.key[mask], (values * owners.count)[mask], minlength=len(work.setting))
        return np.asarray(total[work.key_of_case])

    def of_rank(values: Floats) -> Floats:
        ends = per_key(values, ~is_block)
        return per_key(values, is_block) / layouts.pp + np.where(layouts.pp > 1, ends / 2, ends)

    is_ours = cases.each(lambda s: float(s.is_own)) > 0
    dense = of_rank(owners.dense_parameters) + (is_ours & (layouts.pp > 1)) * of_rank(owners.tied_parameters)
    experts = per_key(owners.expert_parameters, is_block) / layouts.pp
    sharding = [setting.stack.sharding for setting in cases.settings]
    shards = np.array([name == "parameters" for name in sharding])[cases.setting]
    divides = np.array([name != "none" for name in sharding])[cases.setting]
    updated = dense / np.where(divides, layouts.fsdp, 1) + experts / np.where(divides, np.maximum(layouts.efsdp, 1), 1)
    low = cases.each(lambda s: float(s.gathers_low))
    wide = cases.each(lambda s: s.workload.activation_element_bytes)
    return DataParallel(
        layouts=layouts,
        work=work,
        shards_parameters=shards,
        overlaps=cases.each(lambda s: float(s.stack.dp_overlap)) > 0,
        fuses_sum=cases.each(lambda s: float(s.stack.fuses_gradient_sum)) > 0,
        element_bytes=wide,
        gather_bytes=np.where(low > 0, 1.0, wide),
        reduce_bytes=cases.each(lambda s: 4.0 if s.workload.gradient_dtype == "float32" else 2.0),
        dense_parameters=dense,
        expert_parameters=experts,
        replicated_parameters=of_rank(owners.replicated_parameters)
        * cases.each(lambda s: float(s.stack.sequence_parallel)),
        updated=updated,
        is_own=is_ours,
        num_microbatches=cases.num_microbatches,
        num_blocks=per_key(np.ones(len(owners.key)), is_block),
    )


def fsdp_exposed_s(
    dp: DataParallel,
    owner: Index,
    fabric: Fabric,
    c: Constants,
    block: tuple[Floats, Floats],
    computes: tuple[Floats, Floats],
) -> Floats:
    """Return the seconds of exposed communication that FSDP adds to one block's passes of one microbatch.

    `block` are the seconds of its forward and backward, of our own software with fsdp_copies_s; `computes` the shares
    of them in which the device computes, which is what communication slows down.
    """
    layouts = dp.layouts
    copy = _copy_s(dp, owner)
    gather, scatter = (one + copy for one in block_collectives_s(dp, owner, fabric))
    replicas, summed = replicas_all_reduce_s(dp, owner, fabric)
    shards = group_of(layouts.tp, layouts.fsdp, fabric)
    # FSDP2 reduces over replicas on a stream of its own, and over other links where each node has all shards.
    is_apart = dp.is_own & (shards.num_domains == 1) & (replicas.num_domains > 1)
    # Shares of microbatches: what is freed is gathered for each, what is kept for one.
    last = 1.0 / dp.num_microbatches
    # Ranks that share their tokens, by tp alone, still share out experts (ours).
    shares_experts = dp.is_own & (layouts.efsdp > 1) & (dp.work.owners.expert_parameters[owner] > 0)
    is_freed = layouts.is_resharded & ((layouts.fsdp > 1) | shares_experts)
    gathered = np.where(is_freed, 1.0, last)
    again = np.where(is_freed, gather, 0.0)
    forward = gathered * _exposed(gather, block[0], c, computes[0])
    is_each = layouts.reduces_each_microbatch
    behind = np.where(layouts.splits_backward, 0.0, block[1])
    after_stage = _hidden_after_stage(dp, scatter, block[1], c)
    reduced = _exposed(again + scatter, behind, c, computes[1]) - after_stage
    gathered_again = _exposed(again, block[1], c, computes[1])
    before_last = np.where(is_each, reduced, gathered_again)
    # The host can add gradients to others only when they are there, and the device waits for it.
    before_last = np.where(sums_on_host(layouts), gathered_again + scatter, before_last)
    # Copies of the two cross PCIe both ways at once.
    both = np.maximum(again + scatter - copy, 0.0)
    at_once = np.where(is_apart, np.maximum(both, summed), both + summed)
    # Nothing is computed after the stage that a rank is done with last.
    at_end = _exposed(at_once, behind, c, computes[1]) - (1 - 1 / layouts.stages_per_rank) * after_stage
    backward = (1 - last) * before_last + last * at_end
    is_shared = (layouts.dp * layouts.cp > 1) | shares_experts | layouts.cpu_offload
    return np.where(dp.shards_parameters & is_shared, forward + backward, 0.0)


def _hidden_after_stage(dp: DataParallel, scatter: Floats, backward_s: Floats, c: Constants) -> Floats:
    """Return the seconds of a block's reduction that hide where a backward has two parts, in the mean over blocks.

    A stage reduces its blocks one by one when its backward is done. The last one hides behind what is computed next,
    which is at least the backward to the weights of another stage.
    """
    layouts = dp.layouts
    last_of_stage = np.minimum(layouts.num_stages / dp.num_blocks, 1.0)
    weights_s = backward_s / 2 / last_of_stage
    return np.where(layouts.splits_backward, last_of_stage * (scatter - _exposed(scatter, weights_s, c)), 0.0)


def first_block_exposed_s(
    dp: DataParallel,
    owner: Index,
    fabric: Fabric,
    c: Constants,
    block: tuple[Floats, Floats],
    ends: tuple[Floats, Floats],
) -> Floats:
    """Return the seconds, for one microbatch, that the first block's gather and the reduction of its gradients, the
    last one, are exposed for longer than those of others: they hide behind what stands before it, not behind a block.

    `block` and `ends` are the seconds of either, forward and backward. 0 in a pipeline, whose stages gather ahead, and
    reduce when all of it is done; and 0 of other software, whose multipliers were fitted to whole steps without it.
    """
    layouts, last = dp.layouts, 1.0 / dp.num_microbatches
    # Experts on ranks of their own are a unit within their block, which hides behind the rest of it.
    is_one_unit = (layouts.ep == 1) & (layouts.tp == 1)
    gather, scatter = block_collectives_s(dp, owner, fabric, with_experts=is_one_unit)
    gathers = np.where(layouts.is_resharded, 1.0, last)
    reduces = np.where(layouts.reduces_each_microbatch, 1.0, last)
    longer = [
        np.maximum(_exposed(own_s, end_s, c) - _exposed(own_s, block_s, c), 0)
        for own_s, end_s, block_s in zip((gather, scatter), ends, block, strict=True)
    ]
    is_alone = dp.shards_parameters & dp.is_own & (layouts.dp * layouts.cp > 1) & (layouts.pp == 1)
    return np.where(is_alone, gathers * longer[0] + reduces * longer[1], 0.0)


def block_collectives_s(
    dp: DataParallel, owner: Index, fabric: Fabric, *, with_experts: NDArray[np.bool_] | bool = True
) -> tuple[Floats, Floats]:
    """Return the seconds in which one block's parameters are gathered, and its gradients reduced, none hidden."""
    owners, layouts = dp.work.owners, dp.layouts
    dense, experts = owners.dense_parameters[owner], np.where(with_experts, owners.expert_parameters[owner], 0.0)
    group = group_of(layouts.tp, layouts.fsdp, fabric)
    expert_group = group_of(layouts.ep * layouts.etp, np.maximum(layouts.efsdp, 1), fabric)

    def whole_block_s(collective_s: Callable[[ArrayLike, Group, Fabric], Floats], element_bytes: Floats) -> Floats:
        whole = collective_s(dense * element_bytes, group, fabric)
        return whole + np.where(experts > 0, collective_s(experts * element_bytes, expert_group, fabric), 0.0)

    return whole_block_s(all_gather_s, dp.gather_bytes), whole_block_s(reduce_scatter_s, dp.reduce_bytes)


def replicas_all_reduce_s(dp: DataParallel, owner: Index, fabric: Fabric) -> tuple[Group, Floats]:
    """Return the groups of replicas, and the seconds in which one block's gradient shards are summed over them."""
    owners, layouts = dp.work.owners, dp.layouts
    dense, experts = owners.dense_parameters[owner], owners.expert_parameters[owner]
    replicas = group_of(layouts.tp * layouts.fsdp, layouts.dp_replicate, fabric)
    shard = (dense / layouts.fsdp + experts / np.maximum(layouts.efsdp, 1)) * dp.reduce_bytes
    return replicas, all_reduce_s(shard, replicas, fabric)


def _copy_s(dp: DataParallel, owner: Index) -> Floats:
    """Return the seconds in which one block's parameters, or gradients, cross PCIe; 0 where they stay on the device."""
    owners, layouts = dp.work.owners, dp.layouts
    own = owners.dense_parameters[owner] / layouts.fsdp + owners.expert_parameters[owner] / np.maximum(layouts.efsdp, 1)
    return copy_s(layouts, own)


def _exposed(own_s: Floats, hidden_behind_s: Floats, c: Constants, computes: Floats | float = 1.0) -> Floats:
    longer_by_s = np.maximum(own_s - hidden_behind_s, 0)
    return np.asarray(longer_by_s + c["overlap_slowdown"] * computes * np.minimum(own_s, hidden_behind_s))


def dense_parameters(dp: DataParallel, owner: Index) -> Floats:
    """Return the dense parameters of one owner, with those of which a pipeline's last stage has a copy (ours)."""
    owners = dp.work.owners
    copied = np.where(dp.is_own & (dp.layouts.pp > 1), owners.tied_parameters[owner], 0.0)
    return np.asarray(owners.dense_parameters[owner] + copied)


def ends_exposed_s(dp: DataParallel, owner: Index, fabric: Fabric) -> Floats:
    """Return the seconds, for one microbatch, of gathering what stands before or after the blocks and reducing its
    gradients: at the ends of a pass there is nothing to hide them behind.
    """
    layouts, parameters = dp.layouts, dense_parameters(dp, owner)
    group = group_of(layouts.tp, layouts.fsdp, fabric)
    replicas = group_of(layouts.tp * layouts.fsdp, layouts.dp_replicate, fabric)
    whole = all_gather_s(parameters * dp.element_bytes, group, fabric)
    scatter = reduce_scatter_s(parameters * dp.reduce_bytes, group, fabric)
    summed = all_reduce_s(parameters / layouts.fsdp * dp.reduce_bytes, replicas, fabric)
    last = 1.0 / dp.num_microbatches
    # Kept from forward to backward, but for one microbatch only if blocks are freed.
    gathers = np.where(layouts.is_resharded, 1.0, last)
    reduces = np.where(layouts.reduces_each_microbatch, 1.0, last)
    copied = (gathers + np.where(sums_on_host(layouts), 1.0, last)) * copy_s(layouts, parameters / layouts.fsdp)
    return np.where(dp.shards_parameters, gathers * whole + reduces * scatter + last * summed + copied, 0.0)


def replicated_sums_s(dp: DataParallel, fabric: Fabric) -> Floats:
    """Return the seconds, once a step, of summing over tp the gradients of what all of its ranks hold whole."""
    layouts = dp.layouts
    shard = dp.replicated_parameters / np.where(dp.shards_parameters, layouts.fsdp, 1)
    group = group_of(1, layouts.tp, fabric)
    return np.where(shard > 0, all_reduce_s(shard * dp.reduce_bytes, group, fabric), 0.0)


def exposed_update_s(dp: DataParallel, fabric: Fabric, c: Constants, hidden_behind_s: Floats) -> Floats:
    """Return the seconds of exchanging gradients and parameters once a step that nothing hides (not FSDP)."""
    layouts = dp.layouts
    group = group_of(layouts.tp, layouts.dp * layouts.cp, fabric)
    num_experts = np.maximum(layouts.dp * layouts.cp * layouts.tp // (layouts.ep * layouts.etp), 1)
    expert_group = group_of(layouts.ep * layouts.etp, num_experts, fabric)
    element_bytes = (dp.reduce_bytes + dp.element_bytes) * 1.0
    whole = all_gather_s(dp.dense_parameters * element_bytes, group, fabric)
    whole = whole + np.where(
        dp.expert_parameters > 0, all_gather_s(dp.expert_parameters * element_bytes, expert_group, fabric), 0.0
    )
    hidden = np.where(dp.overlaps, 0.8 * hidden_behind_s, 0.0)
    exposed = np.where(dp.overlaps, np.maximum(whole * c["dp_exposed"], whole - hidden), whole)
    return np.where(dp.shards_parameters, 0.0, exposed)
