"""HostCopies: what FSDP2 copies and what adds up gradients where kernels run on the host, as measured there.

    gather    copies of a shard into a buffer, and of the buffer's parameters out of it
    reduce    a copy of the gradients into a buffer
    sum       read twice and written once for each microbatch but the first, and a kernel's start for each tensor
    round     read and written four times where sums are exact, and as many starts

Source: the op lines of FSDP2's operators in the device's catalogue entry, by which the simulator prices them, too
(host_ops.py). Where there are none, bytes over the host's memory rate. Ignored: casts, and copies of the shards that
are reduced.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.communication.data_parallel import (
    ROUNDING_KERNELS,
    DataParallel,
    dense_parameters,
    trained_dense_parameters,
)
from meshwright.cost.compute.block_time import formula_launch_s
from meshwright.cost.constants import fitted_constants
from meshwright.cost.host.host_block_time import launch_s
from meshwright.cost.layout_table import Floats, Passes
from meshwright.cost.memory.host_memory import HOST_BYTES_PER_S
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.rates import memory_op_rates
from meshwright.spec.machine.device import OpLine
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

_COPY_IN, _COPY_OUT = "fsdp.all_gather_copy_in.default", "fsdp.split_with_sizes_copy.default"
_COPY_GRADIENTS = "fsdp.chunk_cat.default"
_READ_AND_WRITE = 2.0
_ADDED_ELEMENTS = 1 << 18
"""Of a large gradient, at whose size additions are looked up."""


@dataclass(frozen=True)
class _Line:
    """Seconds of an operator of each configuration's device."""

    start_s: Floats
    s_per_byte: Floats

    def seconds(self, num_bytes: Floats) -> Floats:
        return self.start_s + _READ_AND_WRITE * num_bytes * self.s_per_byte


class HostCopies:
    """Prices the copies of one position and microbatch."""

    def __init__(self, configs: Configurations, parallel: DataParallel) -> None:
        self.parallel = parallel
        self._in, self._out, self._gradients = (
            _Line(configs.each(partial(_start_s, op)), configs.each(partial(_s_per_byte, op)))
            for op in (_COPY_IN, _COPY_OUT, _COPY_GRADIENTS)
        )
        self._s_per_added_byte, self._launch_s = configs.each(_s_per_added_byte), configs.each(_launch_s)

    def at(self, position: BlockPosition) -> Passes:
        """Return the seconds of a position, forward and backward."""
        dp, layouts, row = self.parallel, self.parallel.layouts, position.row
        parameters = dense_parameters(dp, row) + dp.work.blocks.expert_parameters[row]
        trained = trained_dense_parameters(dp, row) + dp.work.blocks.trained_expert_parameters[row]
        last, is_shared = 1.0 / dp.num_microbatches, layouts.fsdp > 1
        gathered = parameters * dp.gather_bytes
        gather_s = self._in.seconds(gathered / layouts.fsdp) + self._out.seconds(gathered)
        reduce_s = self._gradients.seconds(trained * dp.reduce_bytes)
        reduces = np.where(layouts.reduces_each_microbatch, 1.0, last)
        gathers_again = layouts.is_resharded & (position.kind == BLOCK)
        starts_s = dp.work.blocks.num_trained_tensors[row] * self._launch_s
        added = trained * (2 * dp.reduce_bytes + dp.element_bytes)
        sums_s = (1 - last) * (added * self._s_per_added_byte + starts_s)
        rounded_s = trained * dp.rounded_bytes * self._s_per_added_byte
        sums_s = sums_s + rounded_s + ROUNDING_KERNELS * (dp.rounded_bytes > 0) * starts_s
        forward = np.where(is_shared, np.where(layouts.is_resharded, 1.0, last) * gather_s, 0.0)
        return forward, sums_s + np.where(is_shared, gathers_again * gather_s + reduces * reduce_s, 0.0)


def _launch_s(setup: TrainingSetup) -> float:
    """Return the host's seconds of a kernel, by formula where they were not measured."""
    measured_s = launch_s(setup)
    return formula_launch_s(setup.stack, fitted_constants()) if math.isnan(measured_s) else measured_s


def _lines(op: str, setup: TrainingSetup) -> list[OpLine]:
    """Return the operator's line in the format of activations, in which parameters are gathered; none or one."""
    dtype = setup.workload.activation_dtype
    return [line for line in setup.cluster.device.op_lines if (line.op, line.dtype) == (op, dtype)]


def _start_s(op: str, setup: TrainingSetup) -> float:
    return next((line.start_s.value for line in _lines(op, setup)), 0.0)


def _s_per_byte(op: str, setup: TrainingSetup) -> float:
    if not setup.cluster.device.op_lines:
        return setup.cluster.devices_per_node / HOST_BYTES_PER_S
    return next((1 / line.bytes_per_s.value for line in _lines(op, setup) if line.bytes_per_s), 0.0)


def _s_per_added_byte(setup: TrainingSetup) -> float:
    """Return the seconds of a byte of sums, as of a tensor that is added to itself: read once and written once."""
    rate, _ = memory_op_rates(setup.cluster.device, "add", "float32")
    if rate is None:
        return setup.cluster.devices_per_node / HOST_BYTES_PER_S
    return 1 / (_READ_AND_WRITE * BYTES_PER_ELEMENT["float32"] * float(rate(_ADDED_ELEMENTS)))
