"""Seconds of the link to the host, over which kernels use managed memory that stays there (memory.* = "uvm").

    kernel      max(its seconds on the device, bytes read / PCIe, bytes written / PCIe): kernels read and write it as
                they run, both directions of the link at once
    optimizer   AdamW, float32: one kernel reads 8 bytes of the states of each parameter and writes 8; of an embedding
                in managed memory 4 and 4 more. bfloat16: 4 bytes are read before the kernel and 4 written after it.
                Muon with float32 states reads 4 and writes 4, then reads 4 again; with bfloat16 2, 2 and 2
    embedding   4 bytes of each of a rank's parameters of the embedding for each gather: one for each microbatch, or
                one a step where parameters stay gathered

Managed memory has the bytes of what it holds on the host, and none on the device. Ignored: devices that share a PCIe
switch, NVLink-C2C, that a kernel's loads reach less of the link than a copy engine, and the second copy of a tied
embedding in the time of a pipeline's last stage. Never measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import FIRST
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.layout_table import Floats
from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.cost.optimizer_update import UpdateCost
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.trace.trace import Signature

_PARAMETER_BYTES = 4.0
_KERNEL_SHARE = 28.0 / 48.0
"""Of the bytes of an AdamW update those of its kernel; the rest scales and clips gradients (optimizer_update.py)."""
_STATE_BYTES = {"float32": 8.0, "bfloat16": 8.0}
"""Of the states of a parameter that the link carries one after the other, by their format: AdamW's, and Muon's where
they are float32."""
_MUON_BFLOAT16_BYTES = 6.0


def link_seconds(signature: Signature) -> float:
    """Return the seconds in which the link carries what a kernel reads and writes of managed memory."""
    return max(signature.managed_read_bytes, signature.managed_written_bytes) / PCIE_BYTES_PER_S


class ManagedMemory:
    """What each step reads and writes over the link, one element a configuration."""

    def __init__(self, configs: Configurations, parallel: DataParallel, positions: Sequence[BlockPosition]) -> None:
        self._embedding = np.zeros(len(configs))
        for position in positions:
            if position.kind == FIRST:
                self._embedding = self._embedding + position.count * parallel.shard(position.row)
        self._embedding = self._embedding * configs.has(lambda setup: setup.pools_embedding)
        layouts = configs.layouts
        # Our runtime frees nothing that one rank holds whole.
        reads = np.where(layouts.is_resharded & (layouts.fsdp > 1), configs.num_microbatches, 1.0)
        reads_s = reads * self._embedding * _PARAMETER_BYTES / PCIE_BYTES_PER_S
        # In one graph the stream that computes reads it.
        is_piped, is_shared = layouts.pp > 1, (layouts.fsdp > 1) & ~layouts.compiles_model
        self.gather_s = np.where(is_shared & ~is_piped, reads_s, 0.0)
        """Seconds of reading the embedding to be gathered, in each step."""
        self.cast_s = np.where(is_shared | is_piped, 0.0, reads_s)
        """The same where one rank has the whole embedding, which it copies in the compute format."""
        self.start_s = np.where(is_piped, reads_s, 0.0)
        """The same in a pipeline, which gathers before its first microbatch."""
        pools_state = configs.has(lambda setup: setup.pools_optimizer_state)
        self._updated = parallel.updated * pools_state
        self._state_bytes = configs.each(_state_bytes)
        self._muon_bytes = configs.each(_muon_bytes)

    def update_s(self, optimizer_s: Floats, update: UpdateCost) -> Floats:
        """Return the seconds of an update that takes `optimizer_s` where all is on the device."""
        matrices = np.where(self._updated > 0, update.matrix_elements, 0.0)
        num_bytes = (self._updated - matrices) * self._state_bytes + matrices * self._muon_bytes
        link_s = (num_bytes + self._embedding * _PARAMETER_BYTES) / PCIE_BYTES_PER_S
        # The other optimizers read and write states before and after their kernels.
        kernel_s = np.where(update.is_plain, optimizer_s * _KERNEL_SHARE, 0.0)
        return optimizer_s + np.maximum(link_s - kernel_s, 0.0)


def _state_bytes(setup: TrainingSetup) -> float:
    return _STATE_BYTES.get(setup.workload.optimizer_state_dtype, 0.0)


def _muon_bytes(setup: TrainingSetup) -> float:
    is_short = setup.workload.optimizer_state_dtype == "bfloat16"
    return _MUON_BFLOAT16_BYTES if is_short and setup.workload.optimizer == "muon" else _state_bytes(setup)
