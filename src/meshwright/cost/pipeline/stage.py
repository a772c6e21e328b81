"""How unequal pipeline ranks are, what a schedule's bubble costs in closed form, and one microbatch's pass of a rank.

    slowest   even: ceil(L / (pp v)) v blocks, next to the head on the last rank; balanced: the best of what the others
              take with the head counted as blocks, rounded up, and of the last rank where it is rounded down
    bubble    (pp - 1) (F + B) / v for one microbatch; of a split backward (pp - 1) I / v, I being its first half

Sources: Narayanan et al. 2021 (arXiv:2104.04473) for 1F1B and interleaving, Qi et al. 2023 (arXiv:2401.10241) for zero
bubble. Ignored: that the first stages hold other blocks than the last ones; finalists are replayed action by action.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import Work
from meshwright.cost.layout_table import Bools, Floats, LayoutTable
from meshwright.cost.training_setup import Configurations
from meshwright.spec.layout.layout import SCHEDULES

_DUAL_CODE = SCHEDULES.index("DualPipeV")
_ZBV_CODE, _LOOP_CODE = SCHEDULES.index("ZBVZeroBubble"), SCHEDULES.index("InterleavedZeroBubble")


@dataclass(frozen=True)
class BlocksPerRank:
    """Blocks of the fullest ranks, one element a configuration."""

    num_ranks: Floats
    num_blocks: Floats
    blocks_inside: Floats
    """Blocks of a rank without embedding or head."""
    blocks_last: Floats
    """Blocks of the last rank."""
    is_balanced: Bools
    num_chunks: Floats

    def slowest_s(self, blocks_s: Floats, first_s: Floats, last_s: Floats) -> Floats:
        """Return the seconds of the slowest rank for one microbatch."""
        block_s = blocks_s / self.num_blocks
        even = np.maximum(self.blocks_inside * block_s, self.blocks_last * block_s + last_s)
        even = np.maximum(
            even, self.blocks_inside * block_s + np.where(self.blocks_inside == self.blocks_last, first_s, 0)
        )
        chunks = self.num_ranks * self.num_chunks
        per_chunk = (self.num_blocks + last_s / np.maximum(block_s, 1e-12)) / chunks
        most, fewest = np.ceil(per_chunk - 1e-6), np.floor(per_chunk + 1e-6)
        # The last chunk has fewer blocks than the others and the head, or the others have one less and it has the rest.
        of_others = most * self.num_chunks * block_s
        of_last = ((self.num_chunks - chunks) * fewest + self.num_blocks) * block_s + last_s
        mean = (blocks_s + last_s) / self.num_ranks
        balanced = np.maximum(np.maximum(np.minimum(of_others, of_last), last_s), mean)
        slowest = np.where(self.is_balanced, np.minimum(balanced, even), even)
        return np.where(self.num_ranks > 1, slowest, blocks_s + first_s + last_s)


def blocks_per_rank(configs: Configurations, work: Work) -> BlocksPerRank:
    """Return how many blocks the ranks of each configuration hold."""
    blocks = work.blocks
    is_block = blocks.kind == BLOCK
    count = np.bincount(blocks.key[is_block], blocks.count[is_block], minlength=len(work.setup_index))
    num_blocks = count[work.key_of_config]
    pp, v = configs.layouts.pp.astype(float), configs.layouts.stages_per_rank.astype(float)
    counts_ends = (np.mod(num_blocks + 2, pp * v) == 0) & (np.mod(num_blocks, pp * v) != 0)
    inside = np.where(counts_ends, (num_blocks + 2) / pp, np.ceil(num_blocks / (pp * v) - 1e-9) * v)
    uneven = np.where(v == 1, np.maximum(num_blocks - inside * (pp - 1), 1), inside)
    last = np.where(counts_ends, inside - 1, np.minimum(uneven, inside))
    balanced = configs.has(lambda setup: setup.stack.stages == "balanced")
    return BlocksPerRank(pp, np.maximum(num_blocks, 1), inside, last, balanced, v)


def split_share(layouts: LayoutTable, num_microbatches: Floats) -> Floats:
    """Return the share of a pipeline's backwards that run in two parts: all, in DualPipeV those at the ends of a step.

    There rank r splits 2 pp - 1 - r of its 2 n, as spec/layout/schedule/schedule_orders.py has it; this is the mean
    over ranks.
    The first stage has none: nothing asks for the gradient of its inputs, so that its second part is the whole.
    """
    at_ends = np.minimum(1.0, (3 * layouts.pp - 1) / (4 * np.maximum(num_microbatches, 1)))
    split = np.where(layouts.splits_backward, np.where(layouts.schedule == _DUAL_CODE, at_ends, 1.0), 0.0)
    return np.asarray(split * (1 - 1 / (layouts.pp * layouts.stages_per_rank)), np.float64)


def recompute_passes(layouts: LayoutTable, num_microbatches: Floats) -> Floats:
    """Return how often a microbatch's backward recomputes: a split one in its first part and in its second again."""
    return np.asarray(1 + split_share(layouts, num_microbatches), np.float64)


def bubble_share(layouts: LayoutTable, num_microbatches: Floats, repeated: Floats | float = 0.0) -> Floats:
    """Return the bubble of a step as a multiple of one rank's forward and backward of one microbatch.

    `repeated` is the share of all backwards that is computed in both of their parts. Of a split one remains the input
    halves' way back over the ranks. With few microbatches the first one's way there and back is longer, which only the
    forwards of the others fill (ZBV), or the halves that follow on the first stage (interleaved).
    """
    pp, v, n = layouts.pp, layouts.stages_per_rank, num_microbatches
    # In forwards: a backward is two, a part of it one, or two where it is the whole.
    forward = 1 / (3 + 2 * np.asarray(repeated))
    half = (1 + np.minimum(repeated / np.maximum(split_share(layouts, n), 1e-12), 1.0)) * forward
    few_of_v = (pp - 1) * (forward + half) - (n - 1) * forward
    few_of_loop = pp * (forward + half) + (2 * n - 1) * half / v - n
    few = np.where(layouts.schedule == _ZBV_CODE, few_of_v, np.where(layouts.schedule == _LOOP_CODE, few_of_loop, 0.0))
    splits = np.maximum((pp - 1) * half / v, few)
    return np.asarray(np.where(layouts.splits_backward, splits, (pp - 1) / v), np.float64)


@dataclass(frozen=True)
class RankPass:
    """One microbatch through one rank's share of the whole model, one element a configuration."""

    ideal_matmul: Floats
    ideal_attention: Floats
    reached: Floats
    matmul: Floats
    attention: Floats
    memory: Floats
    host: Floats
    recompute: Floats
    repeat: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    dp: Floats
    first_dp: Floats
    """What a block adds to dp if no block stands before it; not in the total."""
    activation_copies: Floats
    """Exposed, between the memories of the device and the host."""
    copies_back: Floats
    """Those of them in backward; not in the total."""

    @property
    def total(self) -> Floats:
        """Return what all causes come to."""
        names = (
            "matmul",
            "attention",
            "memory",
            "host",
            "recompute",
            "repeat",
            "tp",
            "cp",
            "ep",
            "dp",
            "activation_copies",
        )
        return np.asarray(sum(getattr(self, name) for name in names))

    def __add__(self, other: RankPass) -> RankPass:
        return RankPass(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: Floats) -> RankPass:
        return RankPass(*(getattr(self, f.name) * factor for f in fields(self)))
