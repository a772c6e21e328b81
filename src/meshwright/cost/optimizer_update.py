"""UpdateCost: what one rank's optimizer moves, multiplies and exchanges in a step, one element a configuration.

    AdamW, float32      32 bytes + gradient of each parameter: one fused kernel, and the pass that clips
    AdamW, bfloat16     268 bytes + gradient: the fused kernel on float32 copies, random bits, two roundings
    AdamW, int8         24 bytes + gradient of each element of a block's matrices: one kernel, 4 of the moments
    Muon                75 bytes + gradient of each element of a block's matrices (bfloat16 momentum: 265), AdamW's of
                        the rest
                        max(all matrices / ranks, the largest) x 5 (4 s^2 l + 2 s^3) FLOPs, s and l the matrix's sides
                        2 all-to-alls of 2 bytes of each element of a rank's shards, in ceil(matrices / ranks) rounds

over the memory's rate, the rate of bfloat16 matmuls and the links of the ranks that share the matrices: those of
FSDP, and of tp where it cuts them. Our own trainer on an accelerator also starts 20 kernels: 2 updates, with and
without decay, and the norm of all gradients; 57 and one for each tensor where the update is compiled. Muon starts 5 for
each matrix of which it holds a part (35 in bfloat16, most for random bits) and 19 for each that it owns. Updates in
backward run on the stream that reduces gradients: those of blocks hide behind the backward of other blocks, but on a
host.

Source: the operators of trainer/optimizer/bfloat16_adamw.py and muon.py, counted; a simulation prices the same from a
trace (tests/fake_ranks/agreement/test_optimizer_costs.py). Ignored: that matrices of several sizes divide unevenly
among ranks, kernels too small for the device's rates, and the launches of AdamW's in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import group_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.layout_table import Floats, LayoutTable
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.cost.work import num_tensors_of
from meshwright.spec.job.optimizer_rules import has_int8_states
from meshwright.spec.machine.device import Device
from meshwright.spec.model.op import GroupedMatmul, Matmul
from meshwright.spec.step.workload import Workload

_ADAMW_BYTES = {"float32": 32.0, "bfloat16": 268.0, "int8": 24.0}
_MUON_BYTES = {"float32": 75.0, "bfloat16": 265.0}
_SENT_BYTES = 2.0
"""Of an element that is exchanged."""
_NORM_BYTES = 4.0
"""Read of each gradient before an update that scales and clips it itself (layout.compile_optimizer)."""
NUM_ITERATIONS = 5
_NUM_KERNELS = 20.0
_NUM_JOINED_KERNELS = 57.0
"""Of numbers, where the update is compiled (layout.compile_optimizer): next to them it has a kernel for each tensor."""
_PART_KERNELS = {"float32": 5.0, "bfloat16": 35.0}
_OWNER_KERNELS = 19.0
"""Of Muon for each matrix of which a rank holds a part, by the momentum's format, and for each that it owns besides:
counted in traces of 1B over tp.
"""


class Matrices(NamedTuple):
    """Matrices of one op, one element a layout."""

    owners: str
    """Which ranks share them: matrices of equal ones are distributed together."""
    num_matrices: Floats
    """Of the ranks that share them."""
    num_ranks: Floats
    """Ranks that share them."""
    num_shards: Floats
    """Those of FSDP among these; the others are of tp or etp."""
    stride: Floats
    """Devices from one of these ranks to the next."""
    sides: tuple[int, int]
    """Rows and columns, the fewer first."""

    @property
    def flops(self) -> float:
        """Return the FLOPs of one orthogonalization."""
        short, long = self.sides
        return NUM_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)


class UpdateCost:
    """The optimizer's work after the last backward."""

    is_asynchronous = True
    """Whether kernels are launched, so that streams hide updates in backward, and each kernel takes a start."""

    def __init__(self, configs: Configurations, parallel: DataParallel) -> None:
        self._size = len(configs)
        self.matrix_elements, self._flops, self._measured_s, self._muon_kernels = np.zeros((4, self._size))
        """Elements of the matrices of blocks on a rank; FLOPs of the busiest rank, their measured seconds; kernels."""
        self._exchanges: list[tuple[NDArray[np.int64], Matrices]] = []
        for position, setup in enumerate(configs.setups):
            if setup.workload.optimizer == "muon" or setup.workload.optimizer_state_dtype == "int8":
                here = np.flatnonzero(configs.setup_index == position)
                self._add(here, [*_matrices(setup, configs.layouts.take(here))], setup)
        of_others, of_matrix = (configs.each(partial(_bytes_of, is_matrix)) for is_matrix in (False, True))
        gradient_bytes = configs.each(_gradient_bytes)
        hides_blocks = self.is_asynchronous & configs.has(lambda setup: setup.workload.updates_in_backward)
        hidden = np.where(hides_blocks, parallel.updated_in_blocks, 0.0)
        others = parallel.updated - hidden - self.matrix_elements
        self.moved_bytes = others * (of_others + gradient_bytes) + self.matrix_elements * (of_matrix + gradient_bytes)
        """Bytes through a rank's memory."""
        joined = _NUM_JOINED_KERNELS + configs.each(num_tensors) / configs.layouts.pp
        kernels = np.where(
            configs.has(lambda setup: setup.stack.joins_update), joined, _NUM_KERNELS + self._muon_kernels
        )
        self.is_plain = configs.has(lambda setup: is_plain(setup.workload)) & ~hides_blocks
        """Whether it is AdamW with float32 states, which may have been measured."""
        self.num_kernels = np.where(self.is_asynchronous & configs.has(_updates_at_once), kernels, 0.0)
        """Kernels of an update and of its clipping, whose starts are all of it for a small model."""

    def elementwise_s(self, bytes_per_s: Floats, passes: float) -> Floats:
        """Return the seconds of all but orthogonalizations, whose bytes pass through memory so often."""
        return self.moved_bytes / bytes_per_s * passes

    def matmul_s(self, flops_per_s: Floats) -> Floats:
        """Return the seconds of the busiest rank's orthogonalizations, at a rate where none was measured."""
        rate = np.where(self._flops > 0, flops_per_s, 1.0)
        return np.where(np.isnan(self._measured_s), self._flops / rate, self._measured_s)

    def exchange_s(self, fabric: Fabric) -> tuple[Floats, Floats]:
        """Return the seconds in which matrices travel to their owners and back: over tp or etp alone, and over FSDP."""
        over_tp, over_fsdp = np.zeros(self._size), np.zeros(self._size)
        for here, matrices in self._exchanges:
            number, ranks, stride = (
                _scattered(here, values, self._size)
                for values in (matrices.num_matrices, matrices.num_ranks, matrices.stride)
            )
            group = group_of(np.maximum(stride, 1), np.maximum(ranks, 1), fabric)
            rounds = np.maximum(np.ceil(number / np.maximum(ranks, 1)), 1)
            sent = number * float(np.prod(matrices.sides)) * _SENT_BYTES / np.maximum(ranks, 1)
            seconds = np.where(ranks > 1, 2 * rounds * all_to_all_s(sent / rounds, group, fabric), 0.0)
            is_of_fsdp = _scattered(here, matrices.num_shards, self._size) > 1
            over_tp, over_fsdp = over_tp + seconds * ~is_of_fsdp, over_fsdp + seconds * is_of_fsdp
        return over_tp, over_fsdp

    def _add(self, here: NDArray[np.int64], found: list[Matrices], setup: TrainingSetup) -> None:
        for matrices in found:
            held = matrices.num_matrices * float(np.prod(matrices.sides)) / matrices.num_ranks
            self.matrix_elements[here] += held
        if setup.workload.optimizer != "muon":
            return
        device, of_part = setup.cluster.device, _PART_KERNELS[setup.workload.optimizer_state_dtype]
        for matrices in found:
            self._muon_kernels[here] += matrices.num_matrices * (of_part + _OWNER_KERNELS / matrices.num_ranks)
        self._exchanges += [(here, matrices) for matrices in found]
        for owners in dict.fromkeys(matrices.owners for matrices in found):
            same = [matrices for matrices in found if matrices.owners == owners]
            measured_s = partial(self._orthogonalization_s, device)
            for total, cost_of in ((self._flops, _flops), (self._measured_s, measured_s)):
                each = np.sum([one.num_matrices / one.num_ranks * cost_of(one) for one in same], axis=0)
                total[here] += np.maximum(each, max(cost_of(one) for one in same))

    def _orthogonalization_s(self, device: Device, matrices: Matrices) -> float:
        """Return the measured seconds of one orthogonalization, in float32; nan where it was not measured."""
        return math.nan


def is_plain(workload: Workload) -> bool:
    """Return whether the optimizer is AdamW with float32 states."""
    return (workload.optimizer, workload.optimizer_state_dtype) == ("adamw", "float32")


def num_tensors(setup: TrainingSetup) -> float:
    """Return the parameters of the model, as tensors."""
    return float(sum(group.count * sum(map(num_tensors_of, group.ops)) for group in setup.model.groups))


def _updates_at_once(setup: TrainingSetup) -> bool:
    """Return whether our own trainer updates all parameters after the last backward."""
    return setup.is_own and not setup.workload.updates_in_backward


def _gradient_bytes(setup: TrainingSetup) -> float:
    """Return the bytes moved to scale and clip an element's gradient; updates in backward do neither."""
    if setup.workload.updates_in_backward:
        return 0.0
    return _NORM_BYTES if setup.stack.joins_update else setup.stack.gradient_bytes


def _bytes_of(is_matrix: bool, setup: TrainingSetup) -> float:
    """Return the bytes moved for an element, but for its gradient."""
    workload = setup.workload
    if is_matrix and workload.optimizer == "muon":
        return _MUON_BYTES[workload.optimizer_state_dtype]
    is_quantized = workload.optimizer_state_dtype == "int8"
    return _ADAMW_BYTES["float32" if is_quantized and not is_matrix else workload.optimizer_state_dtype]


def _scattered(here: NDArray[np.int64], values: Floats, size: int) -> Floats:
    whole = np.zeros(size)
    whole[here] = values
    return whole


def _flops(matrices: Matrices) -> float:
    return matrices.flops


def _matrices(setup: TrainingSetup, layouts: LayoutTable) -> Iterator[Matrices]:
    """Yield the block matrices of the mean pipeline rank, by op."""
    one = np.ones(len(layouts))
    shards = np.maximum(layouts.expert_dp_shard, 1)
    is_int8 = setup.workload.optimizer_state_dtype == "int8"
    for group in setup.model.groups:
        for op in group.ops if group.name else ():
            if is_int8 and not (isinstance(op, Matmul | GroupedMatmul) and has_int8_states(op)):
                continue
            count = group.count / layouts.pp
            if isinstance(op, Matmul):
                is_cut = op.tensor_split != "none"
                ranks, stride = layouts.fsdp * (layouts.tp if is_cut else one), one if is_cut else layouts.tp * one
                owners, of_fsdp = "cut by tp" if is_cut else "whole in tp", layouts.fsdp
            elif isinstance(op, GroupedMatmul):
                experts = op.num_experts / layouts.ep
                # FSDP2 shards whole experts where their number divides.
                are_whole = experts % shards == 0
                count = count * np.where(are_whole, experts / shards, experts)
                of_fsdp = np.where(are_whole, 1, shards)
                ranks, stride, owners = of_fsdp * layouts.etp * one, layouts.ep * one, "experts"
            else:
                continue
            short, long = sorted((op.out_features, op.in_features))
            yield Matrices(owners, count * one, ranks * one, of_fsdp * one, stride * one, (short, long))
