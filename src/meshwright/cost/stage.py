"""Stages: how unequal pipeline ranks are, and what a schedule's bubble costs, in closed form.

    slowest   even: ceil(L / (pp v)) v blocks, beside the head on the last rank; balanced: the head counts as blocks
    bubble    (pp - 1) (F + B) / v for one microbatch; a split backward fills part of it with its second half

Sources: Narayanan et al. 2021 (arXiv:2104.04473) for 1F1B and interleaving, Qi et al. 2023 (arXiv:2401.10241) for zero
bubble. Ignored: that the first stages hold other blocks than the last ones; finalists are replayed action by action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.case import Cases, Floats
from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.work import BLOCK, Work
from meshwright.spec.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES

_WEIGHT_SHARE = 1 / 3
"""Second half of a split backward as a share of forward and backward together."""
_SPLIT_CODES = [SCHEDULES.index(name) for name in SPLIT_BACKWARD_SCHEDULES]
_DUAL_CODE = SCHEDULES.index("DualPipeV")
_FILLED = dict.fromkeys(SPLIT_BACKWARD_SCHEDULES, 2 * _WEIGHT_SHARE)
"""Share of the bubble that the second halves of backwards fill: what is left is the first forward's way to each rank.

Of a V with fewer microbatches than two a rank, less.
"""


@dataclass(frozen=True)
class Stages:
    """Blocks of the fullest ranks, one element a case."""

    num_ranks: Floats
    num_blocks: Floats
    blocks_inside: Floats
    """Blocks of a rank without embedding or head."""
    blocks_last: Floats
    """Blocks of the last rank."""
    is_balanced: NDArray[np.bool_]
    num_chunks: Floats

    def slowest_s(self, blocks_s: Floats, first_s: Floats, last_s: Floats) -> Floats:
        """Return the seconds of the slowest rank for one microbatch."""
        block_s = blocks_s / self.num_blocks
        even = np.maximum(self.blocks_inside * block_s, self.blocks_last * block_s + last_s)
        even = np.maximum(
            even, self.blocks_inside * block_s + np.where(self.blocks_inside == self.blocks_last, first_s, 0)
        )
        head_blocks = last_s / np.maximum(block_s, 1e-12)
        chunks = self.num_ranks * self.num_chunks
        per_chunk = np.ceil((self.num_blocks + head_blocks) / chunks - 1e-6)
        balanced = np.maximum(per_chunk * self.num_chunks * block_s, last_s)
        slowest = np.where(self.is_balanced, np.minimum(balanced, even), even)
        return np.where(self.num_ranks > 1, slowest, blocks_s + first_s + last_s)


def stages_of(cases: Cases, work: Work) -> Stages:
    """Return how many blocks the ranks of each case hold."""
    owners = work.owners
    is_block = owners.kind == BLOCK
    count = np.bincount(owners.key[is_block], owners.count[is_block], minlength=len(work.setting))
    num_blocks = count[work.key_of_case]
    pp, v = cases.layouts.pp.astype(float), cases.layouts.stages_per_rank.astype(float)
    counts_ends = (np.mod(num_blocks + 2, pp * v) == 0) & (np.mod(num_blocks, pp * v) != 0)
    inside = np.where(counts_ends, (num_blocks + 2) / pp, np.ceil(num_blocks / (pp * v) - 1e-9) * v)
    uneven = np.where(v == 1, np.maximum(num_blocks - inside * (pp - 1), 1), inside)
    last = np.where(counts_ends, inside - 1, np.minimum(uneven, inside))
    balanced = cases.each(lambda setting: float(setting.stack.stages == "balanced")) > 0
    return Stages(pp, np.maximum(num_blocks, 1), inside, last, balanced, v)


def split_share(layouts: LayoutTable, num_microbatches: Floats) -> Floats:
    """Return the share of a pipeline's backwards that run in two parts: all, in DualPipeV those at the ends of a step.

    There rank r splits 2 pp - 1 - r of its 2 n, as spec/schedule_orders.py has it; this is the mean over ranks.
    """
    is_split = np.isin(layouts.schedule, _SPLIT_CODES) & (layouts.pp > 1)
    at_ends = np.minimum(1.0, (3 * layouts.pp - 1) / (4 * np.maximum(num_microbatches, 1)))
    return np.where(is_split, np.where(layouts.schedule == _DUAL_CODE, at_ends, 1.0), 0.0)


def bubble_share(layouts: LayoutTable, num_microbatches: Floats) -> Floats:
    """Return the bubble of a step as a multiple of one rank's forward and backward of one microbatch."""
    filled = np.array([_FILLED.get(name, 0.0) for name in SCHEDULES])[layouts.schedule]
    return np.asarray((layouts.pp - 1) / layouts.stages_per_rank * (1 - filled), np.float64)
