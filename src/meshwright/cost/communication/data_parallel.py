"""DataParallel: what data-parallel ranks hold and exchange, none of it hidden.

    FSDP     blocks gathered in forward, again in backward if they are freed, and scattered; fsdp_exposed.py hides them
    ZeRO-1   gradients scattered and parameters gathered once a step, hidden behind the last microbatch but for a share
             unless backward adds to them itself, each microbatch's gradients are added to whole ones, or copied into
             the input of a reduce-scatter of their own
    HSDP     one all-reduce of each gradient shard over the replicas besides, once a step
    frozen   gathered, by FSDP, and neither reduced nor updated, nor exchanged by ZeRO-1
    tp       gradients of what its ranks all hold whole (norms, routers) are summed over them once a step, since each
             has seen its part of the sequence

Sources: FSDP (arXiv:2304.11277), ZeRO (arXiv:1910.02054). Ignored: dim-0 padding of shards.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import Work
from meshwright.cost.communication.collective import (
    RankGroup,
    all_gather_s,
    all_reduce_s,
    async_all_reduce_s,
    group_of,
    reduce_scatter_s,
)
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, Passes
from meshwright.cost.training_setup import Configurations
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

ROUNDING_KERNELS = 4.0
"""Of a tensor, each of which reads and writes it, where sums are exact (parallelism/exact_sums.py)."""


class DataParallel:
    """What data-parallel ranks hold and exchange, one element a configuration."""

    def __init__(self, configs: Configurations, work: Work) -> None:
        layouts, blocks = configs.layouts, work.blocks
        self.layouts, self.work, self.num_microbatches = layouts, work, configs.num_microbatches
        self.is_own = configs.has(lambda s: s.is_own)
        """Whether the software is our own trainer."""
        self.shards_parameters = configs.has(lambda s: s.stack.sharding == "parameters")
        # A model's graph sums what it has computed.
        self.sums_in_place = configs.has(lambda s: s.sums_in_place) & layouts.is_replicated & ~layouts.compiles_model
        """Whether gradients are summed over replicas where they are."""
        self.overlaps = configs.has(lambda s: s.stack.dp_overlap)
        self.fuses_sum = configs.has(lambda s: s.stack.fuses_gradient_sum)
        """Whether backward itself adds a microbatch's gradients to those before it."""
        self.element_bytes = configs.each(lambda s: s.workload.activation_element_bytes)
        self.gather_bytes = np.where(configs.has(lambda s: s.gathers_low), 1.0, self.element_bytes)
        """Bytes of a parameter that is gathered."""
        self.reduce_bytes = configs.each(lambda s: BYTES_PER_ELEMENT[s.workload.gradient_dtype])
        """Bytes of a gradient that is reduced."""
        rounds = configs.has(lambda s: s.workload.sums_exactly)
        self.rounded_bytes = np.where(rounds, 2 * ROUNDING_KERNELS * self.element_bytes, 0.0)
        """Bytes that are moved to round a microbatch's gradient of one element before it is added to others (ours)."""
        is_block = blocks.kind == BLOCK
        copied = (self.is_own & (layouts.pp > 1)) * self._of_rank(blocks.tied_parameters)
        self.dense_parameters = self._of_rank(blocks.dense_parameters) + copied
        """Of the fullest rank, before data-parallel ranks share them."""
        self.expert_parameters = self._of_model(blocks.expert_parameters, is_block) / layouts.pp
        """The same of experts."""
        trained_copied = (self.is_own & (layouts.pp > 1)) * self._of_rank(blocks.trained_tied_parameters)
        self.trained_dense_parameters = self._of_rank(blocks.trained_dense_parameters) + trained_copied
        """Of both those that have gradients."""
        self.trained_expert_parameters = self._of_model(blocks.trained_expert_parameters, is_block) / layouts.pp
        has_sequence_parallel = configs.has(lambda s: s.stack.sequence_parallel)
        self.replicated_parameters = self._of_rank(blocks.replicated_parameters) * has_sequence_parallel
        """Those of the trained that tp does not divide, where its ranks share the sequence between matmuls."""
        divides = configs.has(lambda s: s.stack.sharding != "none")
        shards = np.where(divides, layouts.fsdp, 1)
        experts = self.trained_expert_parameters / np.where(divides, np.maximum(layouts.expert_dp_shard, 1), 1)
        self.updated = self.trained_dense_parameters / shards + experts
        """Parameters that one rank updates."""
        self.updated_in_blocks = (
            self._of_model(blocks.trained_dense_parameters, is_block) / layouts.pp / shards + experts
        )
        """Those of blocks."""
        everything = np.ones(len(blocks.key), np.bool_)
        self.num_large_tensors = self._of_model(blocks.num_large_tensors, everything)
        """Parameters of the model whose gradients are summed one by one where they are summed in place."""
        self.large_parameters = self._of_model(blocks.large_parameters, everything)
        """Elements of these."""
        self.num_blocks = self._of_model(np.ones(len(blocks.key)), is_block)
        """Of the model."""

    def shard_group(self, fabric: Fabric) -> RankGroup:
        """Return the ranks that share one copy of the dense parameters."""
        return group_of(self.layouts.tp, self.layouts.fsdp, fabric)

    def expert_group(self, fabric: Fabric) -> RankGroup:
        """Return the ranks that share one copy of a rank's experts."""
        layouts = self.layouts
        return group_of(layouts.ep * layouts.etp, np.maximum(layouts.expert_dp_shard, 1), fabric)

    def replica_group(self, fabric: Fabric) -> RankGroup:
        """Return the ranks that hold the same shards."""
        return group_of(self.layouts.tp * self.layouts.fsdp, self.layouts.dp_replicate, fabric)

    def shard(self, row: Ints) -> Floats:
        """Return the parameters of one block that a rank holds."""
        blocks, layouts = self.work.blocks, self.layouts
        experts = blocks.expert_parameters[row] / np.maximum(layouts.expert_dp_shard, 1)
        return np.asarray(blocks.dense_parameters[row] / layouts.fsdp + experts)

    def trained_shard(self, row: Ints) -> Floats:
        """Return those of them that have gradients."""
        blocks, layouts = self.work.blocks, self.layouts
        experts = blocks.trained_expert_parameters[row] / np.maximum(layouts.expert_dp_shard, 1)
        return np.asarray(blocks.trained_dense_parameters[row] / layouts.fsdp + experts)

    def _of_model(self, values: Floats, mask: Bools) -> Floats:
        """Return the sums of a column of the BlockTable over the chosen blocks."""
        work, blocks = self.work, self.work.blocks
        total = np.bincount(blocks.key[mask], (values * blocks.count)[mask], minlength=len(work.setup_index))
        return np.asarray(total[work.key_of_config])

    def _of_rank(self, values: Floats) -> Floats:
        """Return the same over the blocks of the fullest pipeline rank."""
        pp, is_block = self.layouts.pp, self.work.blocks.kind == BLOCK
        ends = self._of_model(values, ~is_block)
        return self._of_model(values, is_block) / pp + np.where(pp > 1, ends / 2, ends)


def block_collectives_s(dp: DataParallel, row: Ints, fabric: Fabric, *, with_experts: Bools | bool = True) -> Passes:
    """Return the seconds in which one block's parameters are gathered, and its gradients reduced, none hidden."""
    blocks = dp.work.blocks
    group, expert_group = dp.shard_group(fabric), dp.expert_group(fabric)

    def whole_block_s(
        collective_s: Callable[[ArrayLike, RankGroup, Fabric], Floats], dense_bytes: Floats, expert_bytes: Floats
    ) -> Floats:
        whole = np.where(dense_bytes > 0, collective_s(dense_bytes, group, fabric), 0.0)
        return whole + np.where(expert_bytes > 0, collective_s(expert_bytes, expert_group, fabric), 0.0)

    gathered = blocks.dense_parameters[row] * dp.gather_bytes - saved_gather_bytes(dp, row)
    reduced = blocks.trained_dense_parameters[row] * dp.reduce_bytes
    experts, trained = blocks.expert_parameters[row], blocks.trained_expert_parameters[row]
    return (
        whole_block_s(all_gather_s, gathered, np.where(with_experts, experts * dp.gather_bytes, 0.0)),
        whole_block_s(reduce_scatter_s, reduced, np.where(with_experts, trained * dp.reduce_bytes, 0.0)),
    )


def saved_gather_bytes(dp: DataParallel, row: Ints) -> Floats:
    """Return the bytes by which gathering one row's dense weights is less: those of float8 matmuls in float8 (ours),
    and frozen ones of 8 or 4 bits.
    """
    blocks = dp.work.blocks
    return np.asarray(blocks.low_parameters[row] * (dp.gather_bytes - 1.0) + blocks.narrow_gather_bytes[row])


def gather_again_s(dp: DataParallel, row: Ints, fabric: Fabric) -> tuple[RankGroup, Floats]:
    """Return the groups that kept a copy of one block after forward, and the seconds in which they gather it again.

    Experts on ranks of their own have none, and are gathered as in forward.
    """
    blocks, layouts = dp.work.blocks, dp.layouts
    dense, experts = blocks.dense_parameters[row], blocks.expert_parameters[row]
    kept = group_of(layouts.tp, np.maximum(layouts.kept_on, 1), fabric)
    are_apart = (layouts.ep > 1) & (experts > 0)
    apart_s = np.where(are_apart, all_gather_s(experts * dp.gather_bytes, dp.expert_group(fabric), fabric), 0.0)
    return kept, apart_s + all_gather_s((dense + np.where(are_apart, 0.0, experts)) * dp.gather_bytes, kept, fabric)


def replicas_all_reduce_s(dp: DataParallel, row: Ints, fabric: Fabric) -> tuple[RankGroup, Floats]:
    """Return the groups of replicas, and the seconds in which one block's gradient shards are summed over them."""
    replicas = dp.replica_group(fabric)
    return replicas, all_reduce_s(dp.trained_shard(row) * dp.reduce_bytes, replicas, fabric)


def sums_in_place_s(dp: DataParallel, fabric: Fabric) -> Floats:
    """Return the seconds of summing gradients over replicas where they are (parallelism/data/replica_sums.py): large
    ones one by one next to backward, small ones at once after it.
    """
    replicas, number = dp.replica_group(fabric), np.maximum(dp.num_large_tensors, 1)
    large_s = dp.num_large_tensors * async_all_reduce_s(
        dp.large_parameters * dp.reduce_bytes / number, replicas, fabric
    )
    small = np.maximum(dp.trained_dense_parameters + dp.trained_expert_parameters - dp.large_parameters, 0.0)
    return large_s + np.where(small > 0, all_reduce_s(small * dp.reduce_bytes, replicas, fabric), 0.0)


def dense_parameters(dp: DataParallel, row: Ints) -> Floats:
    """Return the dense parameters of one row, with those of which a pipeline's last stage has a copy (ours)."""
    blocks = dp.work.blocks
    copied = np.where(dp.is_own & (dp.layouts.pp > 1), blocks.tied_parameters[row], 0.0)
    return np.asarray(blocks.dense_parameters[row] + copied)


def trained_dense_parameters(dp: DataParallel, row: Ints) -> Floats:
    """Return those of them that have gradients."""
    blocks = dp.work.blocks
    copied = np.where(dp.is_own & (dp.layouts.pp > 1), blocks.trained_tied_parameters[row], 0.0)
    return np.asarray(blocks.trained_dense_parameters[row] + copied)


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
    experts = dp.trained_expert_parameters
    whole = all_gather_s(dp.trained_dense_parameters * element_bytes, group, fabric)
    whole = whole + np.where(experts > 0, all_gather_s(experts * element_bytes, expert_group, fabric), 0.0)
    hidden = np.where(dp.overlaps, c["dp_hiding"] * hidden_behind_s, 0.0)
    exposed = np.where(dp.overlaps, np.maximum(whole * c["dp_exposed"], whole - hidden), whole)
    return np.where(dp.shards_parameters, 0.0, exposed)


def sums_of_numbers_s(layouts: LayoutTable, fabric: Fabric) -> Floats:
    """Return the seconds in which all ranks of a layout sum two numbers of a step: its loss, the norm of gradients."""
    return np.asarray(2 * all_reduce_s(_NUMBER_BYTES, group_of(1, layouts.num_ranks, fabric), fabric))


_NUMBER_BYTES = 8.0
