"""slot_compute: seconds that a device computes for one slot and one microbatch, and that its host launches them.

    forward    matmuls + attention + memory-bound ops
    backward   the same + what is recomputed + what compiled blocks repeat where a backward has two parts

Among memory-bound ops are merges of attention over parts of a sequence (context_attention.py), masks of attention
(attention_mask.py), copies around tp's collectives (sequence_copies.py) and, on the device, the tables of rotary
embedding (own_kernels.py). What FSDP computes (fsdp_copies.py) is not. What repeats: repeats.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.sent import Passes, Resent, Sending
from meshwright.cost.compute.attention_mask import AttentionMask, attention_mask_of
from meshwright.cost.compute.block_time import BlockTimes
from meshwright.cost.compute.context_attention import ContextAttention, context_attention_of
from meshwright.cost.compute.own_kernels import position_kernels
from meshwright.cost.compute.recompute import Recomputed, recomputed_of
from meshwright.cost.compute.repeats import RepeatPricer, repeats_of
from meshwright.cost.compute.sequence_copies import sequence_copies
from meshwright.cost.constants import Constants
from meshwright.cost.pipeline.slots import Slot
from meshwright.cost.pipeline.stage import Stages, recompute_passes
from meshwright.cost.stack_factors import StackFactors
from meshwright.cost.training_setup import Configurations, Floats
from meshwright.cost.work import BLOCK, Bools

_NOTHING = Recomputed(*(np.zeros(1) for _ in fields(Recomputed)))


class Prices(NamedTuple):
    """What follows from one set of constants for all slots."""

    constants: Constants
    slow: StackFactors
    times: BlockTimes
    fabric: Fabric
    memory_rate: Floats
    """Bytes/s."""
    matmul32_rate: Floats
    """FLOP/s of float32."""


@dataclass(frozen=True)
class Computed:
    """Seconds of one slot and one microbatch, one element a configuration."""

    matmul: Passes
    attention: Passes
    merges: Passes
    """Of attention over parts of a sequence; a part of memory."""
    memory: Passes
    recompute: Floats
    repeat: Floats
    host: Passes
    """Of the host, which launches all of this."""

    @property
    def forward(self) -> Floats:
        """Return the device's seconds of the forward pass."""
        return self.matmul[0] + self.attention[0] + self.memory[0]

    @property
    def backward(self) -> Floats:
        """Return the device's seconds of the backward pass."""
        return self.matmul[1] + self.attention[1] + self.memory[1] + self.repeat + self.recompute


@dataclass(frozen=True)
class ComputePricer:
    """Prices what a device computes for one slot and one microbatch."""

    parallel: DataParallel
    split_attention: ContextAttention
    mask: AttentionMask
    recomputed: Recomputed
    recompute_passes: Floats
    repeated: RepeatPricer
    activation_bytes: Floats
    """Of one element."""
    num_blocks: Floats
    makes_tables: Bools
    """Whether kernels that make the tables of rotary embedding are launched: by our own stack."""

    def of_slot(self, slot: Slot, prices: Prices) -> Computed:
        """Return the seconds of a slot."""
        owner, times, slow = slot.owner, prices.times, prices.slow
        matmul_f, matmul_b = (side[owner] * slow.compute for side in times.matmul)
        attention_f, attention_b = self._attention_s(slot, prices)
        slower = slow.compute * slow.overhead
        memory_f, memory_b = (side[owner] * slower for side in times.memory)
        host_f, host_b = (side[owner] * slow.overhead for side in times.host)
        merge_f, merge_b = merges = self._merges_s(slot, prices)
        copied_f, copied_b, copied_again = self._copies_s(slot, prices)
        masks_s = self._masks_s(slot, prices)
        again, passes, matmul_again = self._recomputed(slot), self.recompute_passes, self._matmul_again(slot)
        recompute = matmul_again * matmul_f + passes * (again.attention * attention_f + again.memory * memory_f)
        recompute = recompute + again.collectives * passes * merge_f + passes * copied_again
        # No policy keeps the mask that an operator it keeps has read.
        recompute = recompute + again.memory * passes * masks_s
        memory_f = memory_f + merge_f + masks_s + copied_f + self._tables_s(slot, prices)
        memory_b = memory_b + merge_b + copied_b
        twice = self.repeated.of_slot(slot, times)
        return Computed(
            matmul=(matmul_f, matmul_b),
            attention=(attention_f, attention_b),
            merges=merges,
            memory=(memory_f, memory_b),
            recompute=recompute,
            repeat=twice.matmul * matmul_b + twice.attention * attention_b + twice.memory * memory_b,
            host=(host_f, (1 + twice.memory) * host_b + matmul_again * host_f),
        )

    def sending(self, slot: Slot, block: Computed, times: BlockTimes) -> Sending:
        """Return what a slot's ranks send, and what of `block` hides it."""
        owners, again, passes = self.parallel.work.owners, self._recomputed(slot), self.recompute_passes
        last_share = owners.last_matmul_share[slot.owner]
        tp_again = passes * again.of_collectives(owners.num_tp_collectives[slot.owner], last_share)
        resent = Resent(tp_again, again.collectives * passes, again.exchanges * passes)
        return Sending(slot.owner, block.matmul[0], block.attention, self.repeated.of_slot(slot, times), resent)

    def _recomputed(self, slot: Slot) -> Recomputed:
        return self.recomputed if slot.kind == BLOCK else _NOTHING

    def _matmul_again(self, slot: Slot) -> Floats:
        """Return how often backward runs the matmuls of forward."""
        owners, owner = self.parallel.work.owners, slot.owner
        shares = owners.last_matmul_share[owner], owners.second_matmuls_share[owner], owners.early_terms_share[owner]
        return self.recompute_passes * self._recomputed(slot).of_matmuls(*shares)

    def _attention_s(self, slot: Slot, prices: Prices) -> Passes:
        """Return the seconds of attention, by kernels or, in a ring that has none, by rows."""
        split, slow, c = self.split_attention, prices.slow, prices.constants
        slowdown = split.slowdown(slot.owner, c) * self.mask.slowdown(slot.owner, c)
        kernels_f, kernels_b = (side[slot.owner] * slow.compute * slowdown for side in prices.times.attention)
        if not split.by_rows.any():
            return kernels_f, kernels_b
        products, others = split.rows_s(slot.owner, prices.matmul32_rate, prices.memory_rate, c)
        rows_f, rows_b = (
            slow.compute * (one + slow.overhead * other) for one, other in zip(products, others, strict=True)
        )
        return np.where(split.by_rows, rows_f, kernels_f), np.where(split.by_rows, rows_b, kernels_b)

    def _masks_s(self, slot: Slot, prices: Prices) -> Floats:
        """Return the seconds of making the mask of attention, forward."""
        has_attention = self.parallel.work.owners.attention_flops[slot.owner] > 0
        slower = prices.slow.compute * prices.slow.overhead
        return has_attention * self.mask.moved_bytes() / prices.memory_rate * slower

    def _merges_s(self, slot: Slot, prices: Prices) -> Passes:
        """Return the seconds that attention of a split sequence takes on top of its kernels, both passes."""
        slow, split, kernel_s = prices.slow, self.split_attention, prices.constants["kernel_s"]
        forward, backward = (
            (num_bytes / prices.memory_rate + kernel_s * num_kernels) * slow.compute * slow.overhead
            for num_bytes, num_kernels in zip(split.moved_bytes(slot.owner), split.kernels(), strict=True)
        )
        has_attention = self.parallel.work.owners.attention_flops[slot.owner] > 0
        return forward * has_attention, backward * has_attention

    def _copies_s(self, slot: Slot, prices: Prices) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of copies around tp's collectives: forward, backward, and in what is recomputed."""
        owners, layouts, is_own = self.parallel.work.owners, self.parallel.layouts, self.parallel.is_own
        copied = sequence_copies(owners, slot.owner, layouts, self._recomputed(slot), is_own)
        slower = prices.slow.compute * prices.slow.overhead
        forward, backward, again = (moved * self.activation_bytes / prices.memory_rate * slower for moved in copied)
        return forward, backward, again

    def _tables_s(self, slot: Slot, prices: Prices) -> Floats:
        """Return the seconds of the kernels that make the tables of rotary embedding, forward."""
        owners, layouts = self.parallel.work.owners, self.parallel.layouts
        starts_s = prices.constants["kernel_s"] * position_kernels(owners, slot.owner, layouts, self.num_blocks)
        slower = prices.slow.compute * prices.slow.overhead
        return np.where(self.makes_tables, starts_s * slower, 0.0)


def compute_pricer_of(configs: Configurations, parallel: DataParallel, stage: Stages) -> ComputePricer:
    """Return what prices the computation of `configs`."""
    return ComputePricer(
        parallel=parallel,
        split_attention=context_attention_of(configs, parallel.work.owners),
        mask=attention_mask_of(configs, parallel.work.owners),
        recomputed=recomputed_of(configs),
        recompute_passes=recompute_passes(configs.layouts, configs.num_microbatches),
        repeated=repeats_of(configs, parallel.work.owners),
        activation_bytes=configs.each(lambda s: s.workload.activation_element_bytes),
        num_blocks=stage.num_blocks,
        makes_tables=parallel.is_own,
    )
