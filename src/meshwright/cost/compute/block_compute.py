"""block_compute: seconds that a device computes for one position and one microbatch, and that its host launches them.

    forward    matmuls + attention + memory-bound ops
    backward   the same + what is recomputed + what compiled blocks repeat where a backward has two parts

Among memory-bound ops are merges of attention over parts of a sequence and masks of attention (context_attention.py),
copies around tp's collectives and, on the device, the tables of rotary embedding (own_kernels.py). What FSDP computes
(fsdp_copies.py) is not. What repeats: recompute.py.

Copies are our trainer's, to join and to cut sequences (parallelism/collectives.py), in backward as in forward:

    all-gather        the parts arrive one after the other, and are joined along the sequence
    reduce-scatter    the sequence is cut into the ranks' parts, which lie one after the other

Each reads and writes the whole sequence once. What a column-parallel matmul reads is gathered, and copied, once more in
backward (parallelism/tensor/layers.py), unless its block recomputes it anyway; in a compiled block that copy is part of
what it recomputes. Async tp has none: its matmuls work part by part. Counted in traced steps on torch 2.13, 2026-11-23.
Ignored: that a compiled block also normalises one of its inputs again.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK, BlockTable
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.exposed_traffic import BlockTraffic, RecomputedTraffic
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.block_time import BlockTimes
from meshwright.cost.compute.context_attention import ContextAttention
from meshwright.cost.compute.own_kernels import position_kernels
from meshwright.cost.compute.recompute import Recomputed, RepeatPricer, recomputed_of
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, Passes
from meshwright.cost.pipeline.stage import recompute_passes
from meshwright.cost.stack_factors import StackFactors
from meshwright.cost.training_setup import Configurations

_READ_AND_WRITE = 2.0
_NOTHING = Recomputed(*(np.zeros(1) for _ in fields(Recomputed)))


class Prices(NamedTuple):
    """What follows from one set of constants for all positions."""

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
    """Seconds of one position and one microbatch, one element a configuration."""

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


class ComputePricer:
    """Prices what a device computes for one position and one microbatch."""

    def __init__(self, configs: Configurations, parallel: DataParallel, num_blocks: Floats) -> None:
        self.parallel, self.num_blocks = parallel, num_blocks
        self.split_attention = ContextAttention(configs, parallel.work.blocks)
        self.recomputed = recomputed_of(configs)
        self.recompute_passes = recompute_passes(configs.layouts, configs.num_microbatches)
        self.repeated = RepeatPricer(configs, parallel.work.blocks)
        self.activation_bytes = configs.each(lambda s: s.workload.activation_element_bytes)
        """Of one element."""
        self.makes_tables = parallel.is_own
        """Whether kernels that make the tables of rotary embedding are launched: by our own stack."""

    def at(self, position: BlockPosition, prices: Prices) -> Computed:
        """Return the seconds of a position."""
        row, times, slow = position.row, prices.times, prices.slow
        matmul_f, matmul_b = (side[row] * slow.compute for side in times.matmul)
        attention_f, attention_b = self._attention_s(position, prices)
        slower = slow.compute * slow.overhead
        memory_f, memory_b = (side[row] * slower for side in times.memory)
        host_f, host_b = (side[row] * slow.overhead for side in times.host)
        merge_f, merge_b = merges = self._merges_s(position, prices)
        copied_f, copied_b, copied_again = self._copies_s(position, prices)
        masks_s = self._masks_s(position, prices)
        again, passes, matmul_again = self._recomputed(position), self.recompute_passes, self._matmul_again(position)
        memory_again = again.whole * times.memory_again[row] * slower + again.own_kernels * memory_f
        recompute = matmul_again * matmul_f + passes * (again.attention * attention_f + memory_again)
        recompute = recompute + again.collectives * passes * merge_f + passes * copied_again
        # No policy keeps the mask that an operator it keeps has read.
        recompute = recompute + again.memory * passes * masks_s
        memory_b = memory_b + passes * again.fused * memory_f
        memory_f = memory_f + merge_f + masks_s + copied_f + self._tables_s(position, prices)
        memory_b = memory_b + merge_b + copied_b
        twice = self.repeated.at(position, times)
        return Computed(
            matmul=(matmul_f, matmul_b),
            attention=(attention_f, attention_b),
            merges=merges,
            memory=(memory_f, memory_b),
            recompute=recompute,
            repeat=twice.matmul * matmul_b + twice.attention * attention_b + twice.memory * memory_b,
            host=(host_f, (1 + twice.memory) * host_b + matmul_again * host_f),
        )

    def sending(self, position: BlockPosition, block: Computed, times: BlockTimes) -> BlockTraffic:
        """Return what a position's ranks send, and what of `block` hides it."""
        blocks, again, passes = self.parallel.work.blocks, self._recomputed(position), self.recompute_passes
        last_share = blocks.last_matmul_share[position.row]
        tp_again = passes * again.of_collectives(blocks.num_tp_collectives[position.row], last_share)
        resent = RecomputedTraffic(tp_again, again.collectives * passes, again.exchanges * passes)
        return BlockTraffic(position.row, block.matmul[0], block.attention, self.repeated.at(position, times), resent)

    def _recomputed(self, position: BlockPosition) -> Recomputed:
        return self.recomputed if position.kind == BLOCK else _NOTHING

    def _matmul_again(self, position: BlockPosition) -> Floats:
        """Return how often backward runs the matmuls of forward."""
        blocks, row = self.parallel.work.blocks, position.row
        shares = blocks.last_matmul_share[row], blocks.second_matmuls_share[row], blocks.early_terms_share[row]
        return self.recompute_passes * self._recomputed(position).of_matmuls(*shares)

    def _attention_s(self, position: BlockPosition, prices: Prices) -> Passes:
        """Return the seconds of attention, by kernels or, in a ring that has none, by rows."""
        split, slow, c = self.split_attention, prices.slow, prices.constants
        slowdown = split.slowdown(position.row, c)
        kernels_f, kernels_b = (
            side[position.row] * slow.compute * slower
            for side, slower in zip(prices.times.attention, slowdown, strict=True)
        )
        if not split.by_rows.any():
            return kernels_f, kernels_b
        products, others = split.rows_s(position.row, prices.matmul32_rate, prices.memory_rate, c)
        rows_f, rows_b = (
            slow.compute * (one + slow.overhead * other) for one, other in zip(products, others, strict=True)
        )
        return np.where(split.by_rows, rows_f, kernels_f), np.where(split.by_rows, rows_b, kernels_b)

    def _masks_s(self, position: BlockPosition, prices: Prices) -> Floats:
        """Return the seconds of making the mask of attention, forward."""
        has_attention = self.parallel.work.blocks.attention_flops[position.row] > 0
        slower = prices.slow.compute * prices.slow.overhead
        return has_attention * self.split_attention.mask_bytes() / prices.memory_rate * slower

    def _merges_s(self, position: BlockPosition, prices: Prices) -> Passes:
        """Return the seconds that attention of a split sequence takes on top of its kernels, both passes."""
        slow, split, kernel_s = prices.slow, self.split_attention, prices.constants["kernel_s"]
        forward, backward = (
            (num_bytes / prices.memory_rate + kernel_s * num_kernels) * slow.compute * slow.overhead
            for num_bytes, num_kernels in zip(split.moved_bytes(position.row), split.kernels(), strict=True)
        )
        has_attention = self.parallel.work.blocks.attention_flops[position.row] > 0
        return forward * has_attention, backward * has_attention

    def _copies_s(self, position: BlockPosition, prices: Prices) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of copies around tp's collectives: forward, backward, and in what is recomputed."""
        blocks, layouts, is_own = self.parallel.work.blocks, self.parallel.layouts, self.parallel.is_own
        copied = sequence_copies(blocks, position.row, layouts, self._recomputed(position), is_own)
        slower = prices.slow.compute * prices.slow.overhead
        forward, backward, again = (moved * self.activation_bytes / prices.memory_rate * slower for moved in copied)
        return forward, backward, again

    def _tables_s(self, position: BlockPosition, prices: Prices) -> Floats:
        """Return the seconds of the kernels that make the tables of rotary embedding, forward."""
        blocks, layouts = self.parallel.work.blocks, self.parallel.layouts
        starts_s = prices.constants["kernel_s"] * position_kernels(blocks, position.row, layouts, self.num_blocks)
        slower = prices.slow.compute * prices.slow.overhead
        return np.where(self.makes_tables, starts_s * slower, 0.0)


class SequenceCopies(NamedTuple):
    """Elements that one microbatch moves in one block, or before or after them; one element a configuration."""

    forward: Floats
    backward: Floats
    again: Floats
    """Of what backward recomputes."""


def sequence_copies(
    blocks: BlockTable, row: Ints, layouts: LayoutTable, again: Recomputed, is_own: Bools
) -> SequenceCopies:
    """Return what is copied for `row` of each configuration; nothing where the software is another."""
    is_block, is_compiled = blocks.kind[row] == BLOCK, layouts.compiles_blocks
    copies = np.where(is_own & ~(is_block & layouts.async_tp), _READ_AND_WRITE, 0.0)
    sequence = copies * blocks.tokens[row] * blocks.width[row]
    one_way = sequence * blocks.num_tp_collectives[row]
    regathered = sequence * blocks.num_tp_inputs[row] * (1 - again.memory)
    # Half are gathers, half scatters; recomputation stops before a block's last scatter.
    recomputed = (again.memory / 2 + again.collectives / 4) * one_way
    return SequenceCopies(
        forward=one_way,
        backward=one_way + np.where(is_compiled, 0.0, regathered),
        again=recomputed + np.where(is_compiled, regathered, 0.0),
    )
