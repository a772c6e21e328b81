"""UpdateCost: what one rank's optimizer moves, multiplies and exchanges in a step, one element a configuration.

    AdamW, float32      28 bytes + gradient of each parameter (ours; 32 of other software): one fused kernel, and the
                        passes that scale and clip
    AdamW, bfloat16     268 bytes + gradient: the fused kernel on float32 copies, random bits, two roundings
    AdamW, int8         24 bytes + gradient of each element of a block's matrices: one kernel, 4 of the moments
    Muon                73 bytes + gradient of each element of a block's matrices (bfloat16 momentum: 247), AdamW's of
                        the rest
                        5 iterations of 3 matmuls of each matrix of the busiest rank (spec/step/matrix_owners.py), in
                        tiles, as those of blocks (compute/matmul.py); 5 (4 s^2 l + 2 s^3) FLOPs, s and l its sides
                        2 all-to-alls of 2 bytes of each element of a rank's shards, in ceil(matrices / ranks) rounds

over the memory's rate, the rate of bfloat16 matmuls and the links of the ranks that share the matrices: those of
FSDP, and of tp where it cuts them. Our own trainer on an accelerator also starts 20 kernels: 2 updates, with and
without decay, and the norm of all gradients; 57 and one for each tensor where the update is compiled; AdamW in bfloat16
22 for each tensor, most for random bits, and 18 for each 2^24 elements. Muon starts 3 for each matrix of which it holds
a part (37 in bfloat16), and 21 and one for each of the ranks for each that it owns. Updates in
backward run on the stream that reduces gradients: those of blocks hide behind the backward of other blocks, but on a
host.

Source: the operators of trainer/optimizer/bfloat16_adamw.py and muon.py, counted; a simulation prices the same from a
trace (tests/fake_ranks/agreement/test_optimizer_costs.py). Ignored: that ranks with a small matrix, or none, wait in
each round for those with a large one, and kernels too small for the device's rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.achieved_rates import is_blackwell, num_sms
from meshwright.cost.blocks.rank_parameters import num_trained_tensors_of
from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import group_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.matmul import MatmulSizes, tile_flops
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Floats, LayoutTable
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.job.rules.optimizer_rules import has_int8_states
from meshwright.spec.machine.device import Device
from meshwright.spec.model.op import GroupedMatmul, Matmul
from meshwright.spec.step.matrix_owners import orthogonalization_cost, owners_of
from meshwright.spec.step.workload import Workload

_ADAMW_BYTES = {"float32": 28.0, "bfloat16": 268.0, "int8": 24.0}
_OTHERS_ADAMW_BYTES = 32.0
_MUON_BYTES = {"float32": 73.0, "bfloat16": 247.0}
_SENT_BYTES = 2.0
"""Of an element that is exchanged."""
_NORM_BYTES = 4.0
"""Read of each gradient before an update that scales and clips it itself (layout.compile_optimizer)."""
_EXACT_NORM_BYTES = 168.0
"""Moved for each gradient by a norm that depends on no sharding (parallelism/exact_sums.py), counted by its operators:
its largest magnitude, two digits of its square in float64, and their sums as integers.
"""
_SCALE_BYTES = 8.0
"""Of scaling a gradient's sum to a mean."""
NUM_ITERATIONS = 5
_NUM_KERNELS = 20.0
_NUM_JOINED_KERNELS = 57.0
"""Of numbers, where the update is compiled (layout.compile_optimizer): next to them it has a kernel for each tensor."""
_ROUNDED_TENSOR_KERNELS, _ROUNDED_CHUNK_KERNELS, _CHUNK_ELEMENTS = 22.0, 18.0, 2.0**24
"""Of AdamW in bfloat16, and the elements that it updates at once."""
_PART_KERNELS = {"float32": 3.0, "bfloat16": 37.0}
_OWNER_KERNELS = 21.0
"""Of Muon for each matrix of which a rank holds a part, by the momentum's format, and for each that it owns, besides
one for each rank: counted in traces of 1B and of blocks of 8B.
"""
_MANY = 64
"""Matrices of one rank that are so many that the busiest rank has no more of them than the mean."""


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
        is_one = parallel.is_own & (configs.num_microbatches * configs.layouts.dp * configs.layouts.cp <= 1)
        # A sum of one is its mean. Joined with the update, neither scaling nor clipping is a pass.
        not_scaled = is_one & configs.has(lambda setup: not setup.stack.joins_update)
        gradient_bytes = (configs.each(_gradient_bytes) - _SCALE_BYTES * not_scaled).clip(0)
        hides_blocks = self.is_asynchronous & configs.has(lambda setup: setup.workload.updates_in_backward)
        hidden = np.where(hides_blocks, parallel.updated_in_blocks, 0.0)
        others = parallel.updated - hidden - self.matrix_elements
        self.moved_bytes = others * (of_others + gradient_bytes) + self.matrix_elements * (of_matrix + gradient_bytes)
        """Bytes through a rank's memory."""
        joined = _NUM_JOINED_KERNELS + configs.each(num_tensors) / configs.layouts.pp
        kernels = np.where(
            configs.has(lambda setup: setup.stack.joins_update), joined, _NUM_KERNELS + self._muon_kernels
        )
        kernels = kernels + configs.has(_rounds_moments) * self._rounding_kernels(configs, others)
        self.is_plain = configs.has(lambda setup: is_plain(setup.workload)) & ~hides_blocks
        """Whether it is AdamW with float32 states, which may have been measured."""
        self.num_kernels = np.where(self.is_asynchronous & configs.has(_updates_at_once), kernels, 0.0)
        """Kernels of an update and of its clipping, whose starts are all of it for a small model."""

    def elementwise_s(self, bytes_per_s: Floats, passes: Floats) -> Floats:
        """Return the seconds of all but orthogonalizations, whose bytes pass through memory so often."""
        return np.asarray(self.moved_bytes / bytes_per_s * passes)

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
            of_owner = (_OWNER_KERNELS + matrices.num_ranks) / matrices.num_ranks
            self._muon_kernels[here] += matrices.num_matrices * (of_part + of_owner)
        self._exchanges += [(here, matrices) for matrices in found]
        for owners in dict.fromkeys(matrices.owners for matrices in found):
            same = [matrices for matrices in found if matrices.owners == owners]
            for total, cost_of in ((self._flops, self._flops_of), (self._measured_s, self._orthogonalization_s)):
                total[here] += _of_busiest(same, [cost_of(device, one) for one in same])

    def _rounding_kernels(self, configs: Configurations, elements: Floats) -> Floats:
        """Return the kernels of AdamW in bfloat16 for `elements` on a rank."""
        matrices = np.zeros(self._size)
        for here, one in self._exchanges:
            matrices[here] += one.num_matrices
        tensors = np.maximum(configs.each(num_tensors) / configs.layouts.pp - matrices, 0)
        return _ROUNDED_TENSOR_KERNELS * tensors + _ROUNDED_CHUNK_KERNELS * np.ceil(elements / _CHUNK_ELEMENTS)

    def _flops_of(self, device: Device, matrices: Matrices) -> float:
        """Return the FLOPs at the best rate that take as long as one orthogonalization."""
        return _tile_flops(matrices.sides, num_sms(device), is_blackwell(device))

    def _orthogonalization_s(self, device: Device, matrices: Matrices) -> float:
        """Return the measured seconds of one orthogonalization, in float32; nan where it was not measured."""
        return math.nan


def is_plain(workload: Workload) -> bool:
    """Return whether the optimizer is AdamW with float32 states."""
    return (workload.optimizer, workload.optimizer_state_dtype) == ("adamw", "float32")


def _rounds_moments(setup: TrainingSetup) -> bool:
    return setup.is_own and setup.workload.optimizer_state_dtype == "bfloat16"


def num_tensors(setup: TrainingSetup) -> float:
    """Return the trained parameters of the model, as tensors."""
    groups = setup.trained_model.groups
    return float(sum(group.count * sum(map(num_trained_tensors_of, group.ops)) for group in groups))


def _updates_at_once(setup: TrainingSetup) -> bool:
    """Return whether our own trainer updates all parameters after the last backward."""
    return setup.is_own and not setup.workload.updates_in_backward


def _gradient_bytes(setup: TrainingSetup) -> float:
    """Return the bytes moved to scale and clip an element's gradient; updates in backward do neither."""
    if setup.workload.updates_in_backward:
        return 0.0
    norm = _EXACT_NORM_BYTES if setup.workload.sums_exactly else 0.0
    return norm + (_NORM_BYTES if setup.stack.joins_update else setup.stack.gradient_bytes)


def _bytes_of(is_matrix: bool, setup: TrainingSetup) -> float:
    """Return the bytes moved for an element, but for its gradient."""
    workload = setup.workload
    if is_matrix and workload.optimizer == "muon":
        return _MUON_BYTES[workload.optimizer_state_dtype]
    is_quantized = workload.optimizer_state_dtype == "int8"
    state_dtype = "float32" if is_quantized and not is_matrix else workload.optimizer_state_dtype
    return _OTHERS_ADAMW_BYTES if state_dtype == "float32" and not setup.is_own else _ADAMW_BYTES[state_dtype]


def _scattered(here: NDArray[np.int64], values: Floats, size: int) -> Floats:
    whole = np.zeros(size)
    whole[here] = values
    return whole


def _of_busiest(same: list[Matrices], cost_of_each: list[float]) -> Floats:
    """Return the most that one of the ranks that share the matrices computes, one element a layout."""
    costs = tuple(orthogonalization_cost(*one.sides) for one in same)
    columns = np.array([np.ceil(one.num_matrices) for one in same] + [same[0].num_ranks], np.int64)
    distinct, which = np.unique(columns, axis=1, return_inverse=True)
    most = [
        float((np.array(_owned(costs, tuple(numbers), ranks)) @ cost_of_each).max())
        for *numbers, ranks in distinct.T.tolist()
    ]
    return np.array(most)[which.ravel()]


@lru_cache(maxsize=4096)
def _owned(costs: tuple[int, ...], numbers: tuple[int, ...], num_ranks: int) -> tuple[tuple[float, ...], ...]:
    """Return how many matrices of each cost the ranks own that own differently many, of so many `numbers` in all."""
    if sum(numbers) > _MANY * num_ranks:
        return (tuple(number / num_ranks for number in numbers),)
    kinds = [kind for kind, number in enumerate(numbers) for _ in range(number)]
    owned = owners_of([costs[kind] for kind in kinds], num_ranks)
    return tuple({tuple(Counter(kinds[at] for at in own)[kind] for kind in range(len(costs))) for own in owned})


@lru_cache(maxsize=4096)
def _tile_flops(sides: tuple[int, int], num_sms: float, is_new: bool) -> float:
    short, long = (np.array(side, np.float64) for side in sides)
    small_tile = fitted_constants()["small_tile.blackwell"] if is_new else 1.0
    products = ((short, short, long), (short, short, short), (short, long, short))
    sizes = [MatmulSizes(*one, np.array(1.0)) for one in products]
    return NUM_ITERATIONS * float(sum(tile_flops(one, np.array(num_sms), small_tile) for one in sizes))


def _matrices(setup: TrainingSetup, layouts: LayoutTable) -> Iterator[Matrices]:
    """Yield the block matrices of the mean pipeline rank, by op."""
    one = np.ones(len(layouts))
    shards = np.maximum(layouts.expert_dp_shard, 1)
    is_int8 = setup.workload.optimizer_state_dtype == "int8"
    for group in setup.trained_model.groups:
        for op in group.ops if group.name else ():
            if op.is_frozen:
                continue
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
