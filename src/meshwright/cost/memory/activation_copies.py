"""Activations that wait in the host's memory (layout.activation_offload): exposed copies, and the host's bytes.

    copy        what a block keeps of one microbatch / PCIe, once each way
    exposed     max(0, copy - forward of the next block) + for each part of backward max(0, copy - its time): a block's
                forward hides the copy of what the block before saved, its backward the way back of the same
    ends        what a stage's last block saved comes back before its backward, next to nothing; that of the model's
                last block stays on the device
    host        what is moved of one chunk x chunks in flight (footprint.py)

On a host: cost/host/host_step.py. Source: the order of parallelism/activation_offload.py. Ignored: that the two ways
may share a link, devices that share a PCIe switch, what FSDP2 copies on the same link (cpu_offload), NVLink-C2C,
tensors of fewer than 16 KiB, which stay, that pinned memory is rounded up to powers of two, and that blocks of unequal
policies hide unequal copies.
"""

import numpy as np

from meshwright.cost.block_positions import BlockPosition
from meshwright.cost.compute.recompute import share_of_blocks
from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, Floats, Passes
from meshwright.cost.memory.footprint import model_memory
from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.cost.pipeline.stage import recompute_passes
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.cost.work import BLOCK


class ActivationCopies:
    """Prices the copies of each configuration's blocks."""

    def __init__(self, configs: Configurations, num_blocks: Floats) -> None:
        layouts = configs.layouts
        self._copy_s = self._one_way_s(configs)
        self._backward_parts = recompute_passes(layouts, configs.num_microbatches)
        self._hidden = (num_blocks - layouts.num_stages).clip(0) / num_blocks
        """Share of the blocks whose copies have a block next to them."""
        self._alone = (layouts.num_stages - 1) / num_blocks

    def exposed_s(self, position: BlockPosition, block_s: Passes) -> Floats:
        """Return the exposed seconds of one block's copies for one microbatch, in the mean over a position's blocks,
        whose forward and backward take `block_s`.
        """
        if position.kind != BLOCK or not self._copy_s.any():
            return np.zeros(len(self._copy_s))
        copy_s, parts = self._copy_s, self._backward_parts
        hiding_s = self._hiding_s(block_s)
        exposed_s = (copy_s - hiding_s[0]).clip(0) + parts * (copy_s - hiding_s[1] / parts).clip(0)
        return np.asarray(self._hidden * exposed_s + self._alone * parts * copy_s)

    def _hiding_s(self, block_s: Passes) -> Passes:
        """Return the seconds of a block's passes that its neighbours' copies can hide behind."""
        return block_s

    def _bytes_per_s(self, setup: TrainingSetup) -> float:
        return PCIE_BYTES_PER_S

    def _one_way_s(self, configs: Configurations) -> Floats:
        """Return the seconds in which one block's saved tensors are copied one way, in the mean over the blocks."""
        seconds = np.zeros(len(configs))
        for position in np.unique(configs.setup_index[configs.layouts.activation_offload]):
            rows = np.flatnonzero((configs.setup_index == position) & configs.layouts.activation_offload)
            setup, own = configs.setups[position], configs.take(rows)
            blocks = model_memory(setup, own.layouts).blocks
            shares = np.stack([share_of_blocks(own, policy) for policy in ACTIVATION_CHECKPOINTS])
            # What activation_checkpoint_every leaves out keeps everything.
            shares[ACTIVATION_CHECKPOINTS.index("none")] += 1 - shares.sum(axis=0)
            kept = sum(block.count * (shares * block.kept_bytes).sum(axis=0) for block in blocks)
            num_bytes = kept / sum(block.count for block in blocks)
            seconds[rows] = num_bytes / self._bytes_per_s(setup)
        return seconds
