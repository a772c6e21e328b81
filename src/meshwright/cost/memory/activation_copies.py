"""Activations that wait in the host's memory (layout.activation_offload): exposed copies, and the host's bytes.

    copy        what a block keeps of one microbatch / PCIe, once each way
    exposed     max(0, copy - forward of the next block) + for each part of backward max(0, copy - its time): a block's
                forward hides the copy of what the block before saved, each part of its backward the way back of what is
                read next
    ends        what a stage's first block to be read saved comes back next to nothing, in each part of backward; that
                of the last block of the last stage stays on the device. Stages without blocks have none
    host        what is moved of one chunk x chunks in flight (footprint.py)

On a host: cost/host/host_step.py. Source: the order of parallelism/activation_offload.py. Ignored: that the two ways
may share a link, devices that share a PCIe switch, what FSDP2 copies on the same link (cpu_offload), NVLink-C2C,
tensors of fewer than 16 KiB, which stay, that pinned memory is rounded up to powers of two, that blocks of unequal
policies hide unequal copies, and what a backward to weights that follows its other part at once has on the device. That
the first block of a forward that follows another waits for what that one's last block saved, a replay adds (replay.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.compute.recompute import share_of_blocks
from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, Floats, Ints, Passes
from meshwright.cost.memory.footprint import model_memory
from meshwright.cost.memory.footprint_blocks import ModelMemory
from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.cost.pipeline.stage import recompute_passes
from meshwright.cost.training_setup import Configurations, TrainingSetup


class StageCopies(NamedTuple):
    """Exposed seconds of one microbatch in a stage of n blocks, which may be none."""

    forward_s: float
    """n - 1 times, in forward."""
    between_s: float
    """n - 1 times, in each part of backward."""
    first_s: float
    """Once in each part of backward where it has blocks; not in the last stage."""


class ActivationCopies:
    """Prices the copies of each configuration's blocks."""

    def __init__(self, configs: Configurations, num_blocks: Floats) -> None:
        self._size = len(configs)
        self._copy_s, self._hidden, self._alone, in_first = np.zeros((4, self._size))
        """Seconds of one block's copies one way; shares of the blocks whose copies have a block next to them, and whose
        way back has none.
        """
        for rows, memory in self._offloaded(configs):
            self._copy_s[rows] = self._one_way_s(memory, configs.take(rows))
            num_stages = memory.layouts.num_stages
            starts = [memory.cuts.first_block(np.full(len(rows), one)) for one in range(1 + int(num_stages.max()))]
            of_stage = np.diff(np.stack(starts), axis=0)
            last = np.take_along_axis(of_stage, num_stages[None] - 1, axis=0)[0]
            num_starts, number = (of_stage > 0).sum(axis=0), num_blocks[rows]
            self._hidden[rows] = (number - num_starts) / number
            self._alone[rows] = (num_starts - (last > 0)) / number
            in_first[rows] = of_stage[0] / number
        split = recompute_passes(configs.layouts, configs.num_microbatches) - 1
        # The first stage's backward has one part; its blocks may be more or less than those of others.
        of_others = split / (1 - 1 / np.maximum(configs.layouts.num_stages, 2))
        self._backward_parts = 1 + of_others * (1 - in_first)

    def exposed_s(self, position: BlockPosition, block_s: Passes) -> Passes:
        """Return the exposed seconds of one block's copies for one microbatch, forward and backward, in the mean over a
        position's blocks, whose forward and backward take `block_s`.
        """
        if position.kind != BLOCK or not self._copy_s.any():
            return np.zeros(self._size), np.zeros(self._size)
        copy_s, parts = self._copy_s, self._backward_parts
        hiding_s = self._hiding_s(block_s)
        next_to_block = (copy_s - hiding_s[1] / parts).clip(0)
        back_s = parts * (self._hidden * next_to_block + self._alone * copy_s)
        return self._hidden * (copy_s - hiding_s[0]).clip(0), np.asarray(back_s)

    def of_stages(self, forward_s: Floats, back_s: Floats) -> list[StageCopies]:
        """Return what copies expose in a stage of each configuration, of `exposed_s` in the mean over its blocks."""
        each_part = back_s / self._backward_parts - self._alone * self._copy_s
        between = [side / np.maximum(self._hidden, 1e-12) for side in (forward_s, each_part.clip(0))]
        columns = [column.tolist() for column in (*between, self._copy_s)]
        return [StageCopies(*one) for one in zip(*columns, strict=True)]

    def _hiding_s(self, block_s: Passes) -> Passes:
        """Return the seconds of a block's passes that its neighbours' copies can hide behind."""
        return block_s

    def _bytes_per_s(self, setup: TrainingSetup) -> float:
        return PCIE_BYTES_PER_S

    def _offloaded(self, configs: Configurations) -> Iterator[tuple[Ints, ModelMemory]]:
        """Yield the rows of each setup that offload activations, with what the parts of their model take."""
        for position in np.unique(configs.setup_index[configs.layouts.activation_offload]):
            rows = np.flatnonzero((configs.setup_index == position) & configs.layouts.activation_offload)
            yield rows, model_memory(configs.setups[position], configs.layouts.take(rows))

    def _one_way_s(self, memory: ModelMemory, own: Configurations) -> Floats:
        """Return the seconds in which one block's saved tensors are copied one way, in the mean over the blocks."""
        shares = np.stack([share_of_blocks(own, policy) for policy in ACTIVATION_CHECKPOINTS])
        # What activation_checkpoint_every leaves out keeps everything.
        shares[ACTIVATION_CHECKPOINTS.index("none")] += 1 - shares.sum(axis=0)
        kept = sum(block.count * (shares * block.kept_bytes).sum(axis=0) for block in memory.blocks)
        num_bytes = kept / sum(block.count for block in memory.blocks)
        return np.asarray(num_bytes / self._bytes_per_s(memory.setup))
