"""DataParallel: what data-parallel ranks hold and exchange, none of it hidden.

    FSDP     blocks gathered in forward, again in backward if they are freed, and scattered; fsdp_exposed.py hides them
    ZeRO-1   gradients scattered and parameters gathered once a step, hidden behind the last microbatch but for a share
             unless backward adds to them itself, each microbatch's gradients are added to whole ones, or copied into
             the input of a reduce-scatter of their own
    HSDP     one all-reduce of each gradient shard over the replicas besides, once a step
    tp       gradients of what its ranks all hold whole (norms, routers) are summed over them once a step, since each
             has seen its part of the sequence

Sources: FSDP (arXiv:2304.11277), ZeRO (arXiv:1910.02054). Ignored: dim-0 padding of shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.group import RankGroup, group_of
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.training_setup import Configurations, Floats
from meshwright.cost.work import BLOCK, Work
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

Index = NDArray[np.int64]


@dataclass(frozen=True)
class DataParallel:
    """One element a configuration."""

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


def data_parallel_of(configs: Configurations, work: Work) -> DataParallel:
    """Return what data-parallel ranks hold and exchange."""
    layouts, blocks = configs.layouts, work.blocks
    is_block = blocks.kind == BLOCK

    def per_key(values: Floats, mask: NDArray[np.bool_]) -> Floats:
        total = np.bincount(blocks.key[mask], (values * blocks.count)[mask], minlength=len(work.setup_index))
        return np.asarray(total[work.key_of_config])

    def of_rank(values: Floats) -> Floats:
        ends = per_key(values, ~is_block)
        return per_key(values, is_block) / layouts.pp + np.where(layouts.pp > 1, ends / 2, ends)

    is_ours = configs.each(lambda s: float(s.is_own)) > 0
    dense = of_rank(blocks.dense_parameters) + (is_ours & (layouts.pp > 1)) * of_rank(blocks.tied_parameters)
    experts = per_key(blocks.expert_parameters, is_block) / layouts.pp
    sharding = [setup.stack.sharding for setup in configs.setups]
    shards = np.array([name == "parameters" for name in sharding])[configs.setup_index]
    divides = np.array([name != "none" for name in sharding])[configs.setup_index]
    updated = dense / np.where(divides, layouts.fsdp, 1) + experts / np.where(
        divides, np.maximum(layouts.expert_dp_shard, 1), 1
    )
    low = configs.each(lambda s: float(s.gathers_low))
    wide = configs.each(lambda s: s.workload.activation_element_bytes)
    return DataParallel(
        layouts=layouts,
        work=work,
        shards_parameters=shards,
        overlaps=configs.each(lambda s: float(s.stack.dp_overlap)) > 0,
        fuses_sum=configs.each(lambda s: float(s.stack.fuses_gradient_sum)) > 0,
        element_bytes=wide,
        gather_bytes=np.where(low > 0, 1.0, wide),
        reduce_bytes=configs.each(lambda s: BYTES_PER_ELEMENT[s.workload.gradient_dtype]),
        dense_parameters=dense,
        expert_parameters=experts,
        replicated_parameters=of_rank(blocks.replicated_parameters)
        * configs.each(lambda s: float(s.stack.sequence_parallel)),
        updated=updated,
        is_own=is_ours,
        num_microbatches=configs.num_microbatches,
        num_blocks=per_key(np.ones(len(blocks.key)), is_block),
    )


def block_collectives_s(
    dp: DataParallel, row: Index, fabric: Fabric, *, with_experts: NDArray[np.bool_] | bool = True
) -> tuple[Floats, Floats]:
    """Return the seconds in which one block's parameters are gathered, and its gradients reduced, none hidden."""
    blocks, layouts = dp.work.blocks, dp.layouts
    dense, experts = blocks.dense_parameters[row], np.where(with_experts, blocks.expert_parameters[row], 0.0)
    group = group_of(layouts.tp, layouts.fsdp, fabric)
    expert_group = group_of(layouts.ep * layouts.etp, np.maximum(layouts.expert_dp_shard, 1), fabric)

    def whole_block_s(collective_s: Callable[[ArrayLike, RankGroup, Fabric], Floats], element_bytes: Floats) -> Floats:
        whole = collective_s(dense * element_bytes, group, fabric)
        return whole + np.where(experts > 0, collective_s(experts * element_bytes, expert_group, fabric), 0.0)

    return whole_block_s(all_gather_s, dp.gather_bytes), whole_block_s(reduce_scatter_s, dp.reduce_bytes)


def gather_again_s(dp: DataParallel, row: Index, fabric: Fabric) -> tuple[RankGroup, Floats]:
    """Return the groups that kept a copy of one block after forward, and the seconds in which they gather it again.

    Experts on ranks of their own have none, and are gathered as in forward.
    """
    blocks, layouts = dp.work.blocks, dp.layouts
    dense, experts = blocks.dense_parameters[row], blocks.expert_parameters[row]
    kept = group_of(layouts.tp, np.maximum(layouts.kept_on, 1), fabric)
    expert_group = group_of(layouts.ep * layouts.etp, np.maximum(layouts.expert_dp_shard, 1), fabric)
    are_apart = (layouts.ep > 1) & (experts > 0)
    apart_s = np.where(are_apart, all_gather_s(experts * dp.gather_bytes, expert_group, fabric), 0.0)
    return kept, apart_s + all_gather_s((dense + np.where(are_apart, 0.0, experts)) * dp.gather_bytes, kept, fabric)


def replicas_all_reduce_s(dp: DataParallel, row: Index, fabric: Fabric) -> tuple[RankGroup, Floats]:
    """Return the groups of replicas, and the seconds in which one block's gradient shards are summed over them."""
    blocks, layouts = dp.work.blocks, dp.layouts
    dense, experts = blocks.dense_parameters[row], blocks.expert_parameters[row]
    replicas = group_of(layouts.tp * layouts.fsdp, layouts.dp_replicate, fabric)
    shard = (dense / layouts.fsdp + experts / np.maximum(layouts.expert_dp_shard, 1)) * dp.reduce_bytes
    return replicas, all_reduce_s(shard, replicas, fabric)


def dense_parameters(dp: DataParallel, row: Index) -> Floats:
    """Return the dense parameters of one row, with those of which a pipeline's last stage has a copy (ours)."""
    blocks = dp.work.blocks
    copied = np.where(dp.is_own & (dp.layouts.pp > 1), blocks.tied_parameters[row], 0.0)
    return np.asarray(blocks.dense_parameters[row] + copied)


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
    hidden = np.where(dp.overlaps, c["dp_hiding"] * hidden_behind_s, 0.0)
    exposed = np.where(dp.overlaps, np.maximum(whole * c["dp_exposed"], whole - hidden), whole)
    return np.where(dp.shards_parameters, 0.0, exposed)
