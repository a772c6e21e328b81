"""HostStepPricer: a step where kernels run on the host's own cores, as measured there.

    microbatch = sum over blocks (matmul + attention + memory [+ recompute] + tp, cp, ep + the host's own seconds)
    step       = microbatches x slowest stage + bubble + sends + exchanges of shards and replicas + optimizer
    unit       = gathers x exchange(bytes) + exchange(bytes) + all-reduce over replicas
    exchanges  = sum over blocks, experts of ep as units of their own, and the root (embedding, head) as one unit more;
                 without FSDP2, all-reduces of each large gradient next to backward, and of all small ones after it
    other      = two all-reduces of one number over all ranks: the loss, and the norm of the gradients

Nothing overlaps: one core prepares, computes, moves and adds the bytes. The host's own seconds before each operator
count as computation, as in a simulation or a profile of a host, and so do FSDP2's copies. A block is gathered for each
forward and each backward, or once if it is kept; the root once a microbatch; gradients are reduced once a step or after
each microbatch.
Source: FSDP2's own order of work, and the points of exchange in the cluster's catalogue entry, which were timed with
all ranks of the machine: parts of them are taken to be as slow. The simulator prices the same collectives by the same
points (simulator/engine/host_comm_ops.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost.blocks.block_positions import BlockPosition
from meshwright.cost.blocks.block_table import BLOCK, LAST
from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, group_of, reduce_scatter_s
from meshwright.cost.communication.data_parallel import (
    DataParallel,
    saved_gather_bytes,
    sums_in_place_s,
    sums_of_numbers_s,
)
from meshwright.cost.communication.exposed_traffic import ExposedTraffic
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.block_compute import Computed, Prices
from meshwright.cost.constants import Constants, fixed_constant
from meshwright.cost.host.host_block_time import HostBlockPricer, launch_s
from meshwright.cost.host.host_copies import HostCopies
from meshwright.cost.layout_table import Bools, Floats, Ints, Passes
from meshwright.cost.memory.activation_copies import ActivationCopies
from meshwright.cost.memory.host_memory import HOST_BYTES_PER_S
from meshwright.cost.optimizer_update import NUM_ITERATIONS, Matrices, UpdateCost, num_tensors
from meshwright.cost.pipeline.stage import RankPass
from meshwright.cost.step import StepPricer, StepTerms
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.rates import matmul_rates, memory_op_rates
from meshwright.spec.machine.device import Device
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

_JOINED_CLIP = fixed_constant("joined_clip")
_READ_AND_WRITE = 2.0
_NOTHING_HIDES = {"cp_exposed": 1.0, "cp_hiding": 0.0, "tp_again_exposed": 1.0, "overlap_slowdown": 1.0}
"""Constants by which devices hide messages of a ring and tp's collectives behind computation, where nothing does."""
_NUMBER_BYTES = BYTES_PER_ELEMENT["float32"]
_SCALE = 2 / 3
"""Of what clipping moves: norms read each gradient, and both scale it, which reads and writes it."""
_UPDATE_KERNELS = 4.0
"""Kernels a parameter: its scaling, its norm, its clipping, its update."""


class HostActivationCopies(ActivationCopies):
    """Copies within the host's own memory, of which they save nothing: read and written once each way."""

    def _hiding_s(self, block_s: Passes) -> Passes:
        return np.zeros_like(block_s[0]), np.zeros_like(block_s[1])

    def _bytes_per_s(self, setup: TrainingSetup) -> float:
        return HOST_BYTES_PER_S / setup.cluster.devices_per_node / _READ_AND_WRITE


class HostUpdateCost(UpdateCost):
    """The optimizer's work as measured on the host."""

    is_asynchronous = False

    def __init__(self, configs: Configurations, parallel: DataParallel) -> None:
        super().__init__(configs, parallel)
        self._update_s = np.where(self.is_plain, _update_s(configs, parallel.updated), np.nan)

    def elementwise_s(self, bytes_per_s: Floats, passes: Floats) -> Floats:
        """Return the same, as measured where it was."""
        return np.where(np.isnan(self._update_s), super().elementwise_s(bytes_per_s, passes), self._update_s)

    def _flops_of(self, device: Device, matrices: Matrices) -> float:
        return matrices.flops

    def _orthogonalization_s(self, device: Device, matrices: Matrices) -> float:
        rate = matmul_rates(device, "float32")
        if rate is None:
            return math.nan
        short, long = matrices.sides
        products = ((short, short, long), (short, short, short), (short, long, short))
        return NUM_ITERATIONS * sum(2.0 * m * n * k / float(rate(*map(np.asarray, (m, n, k)))) for m, n, k in products)


def _update_s(configs: Configurations, num_parameters: Floats) -> Floats:
    """Return the seconds in which a rank scales, clips and updates so many parameters; nan where that was not
    measured.
    """
    seconds = np.full(len(configs), np.nan)
    for position, setup in enumerate(configs.setups):
        (update, _), (clip, _) = (memory_op_rates(setup.cluster.device, op, "float32") for op in ("update", "clip"))
        if update is not None and clip is not None:
            here = configs.setup_index == position
            number = num_parameters[here]
            clips, kernels = (_JOINED_CLIP, 1.0) if setup.stack.joins_update else (1.0 + _SCALE, _UPDATE_KERNELS)
            starts_s = kernels * num_tensors(setup) / configs.layouts.pp[here] * launch_s(setup)
            seconds[here] = number / update(number) + clips * number / clip(number) + starts_s
    return seconds


class HostStepPricer(StepPricer):
    """Prices configurations whose devices are hosts."""

    block_pricer, activation_copies, update_cost = HostBlockPricer, HostActivationCopies, HostUpdateCost

    def __init__(self, configs: Configurations) -> None:
        super().__init__(configs)
        never = np.zeros(len(configs), np.bool_)
        self.traffic.contends = never
        self.compute.makes_tables = never
        self.host_copies = HostCopies(configs, self.parallel)
        # The host has flash attention for 32 bits, too.
        self.compute.split_attention.has_wide_pieces = never

    def price(self, constants: Constants) -> StepTerms:
        """Return the step of each configuration by cause; nothing is CPU-bound where the host itself computes, and
        copies of activations are within its memory.
        """
        step = super().price(constants)
        moved_s = step.memory_bound_ops_s + step.cpu_bound_s + step.activation_copies_s
        return replace(
            step,
            memory_bound_ops_s=moved_s,
            cpu_bound_s=self._none(),
            activation_copies_s=self._none(),
            tp_communication_s=step.tp_communication_s + self._loss_sums_s(self.stacks.slowed(self.fabric, constants)),
        )

    def block_passes(self, constants: Constants) -> list[tuple[BlockPosition, RankPass]]:
        """Return the same; what is sent is exposed."""
        return super().block_passes({**constants, **_NOTHING_HIDES})

    def _loss_sums_s(self, fabric: Fabric) -> Floats:
        """Return the seconds of the sums over tp by which our loss of a vocabulary in parts finds each token's: its
        largest logit, and then three numbers. Their starts, which devices hide, are all of them.
        """
        layouts, blocks = self.layouts, self.work.blocks
        group, seconds = group_of(1, layouts.tp, fabric), self._none()
        chunks = np.maximum(layouts.loss_chunks, 1)
        for position in self.positions:
            if position.kind == LAST:
                num_bytes = blocks.tokens[position.row] / chunks * _NUMBER_BYTES
                each_s = all_reduce_s(num_bytes, group, fabric) + all_reduce_s(3 * num_bytes, group, fabric)
                seconds = seconds + position.count * chunks * self.microbatches * each_s / layouts.pp
        return np.where(self.parallel.is_own, seconds, 0.0)

    def _copies_s(self, position: BlockPosition, prices: Prices) -> Passes:
        return self.host_copies.at(position)

    def _fsdp_s(self, position: BlockPosition, prices: Prices, busy: Passes, whole: Passes) -> Passes:
        return self._none(), self._none()

    def _waits(self, block: Computed, sent: ExposedTraffic, c: Constants) -> Passes:
        return block.host

    def _exchanges_s(self, fabric: Fabric, c: Constants, hidden_behind_s: Floats) -> Floats:
        return measured_exchanges_s(self.parallel, self.positions, fabric)

    def _sums_of_numbers_s(self, fabric: Fabric) -> Floats:
        return sums_of_numbers_s(self.layouts, fabric)

    def host_as_memory_ops_s(self, passes: RankPass) -> Floats:
        """Return all of them."""
        return passes.host

    def _fixed_s(self, c: Constants) -> Floats:
        return self._none()

    def _none(self) -> Floats:
        return np.zeros(len(self.configs))


def measured_exchanges_s(dp: DataParallel, positions: Sequence[BlockPosition], fabric: Fabric) -> Floats:
    """Return the seconds of a step's exchanges."""
    layouts, n = dp.layouts, dp.num_microbatches
    blocks_s = np.zeros(len(layouts))
    root = _Unit(np.zeros(len(layouts)), np.zeros(len(layouts)))
    for position in positions:
        dense, experts = _units(dp, position)
        if position.kind != BLOCK:
            root = root.plus(dense.times(position.count))
            continue
        gathers = np.where(layouts.is_resharded, 2 * n, 1.0)
        saved = saved_gather_bytes(dp, position.row)
        are_apart = (layouts.ep > 1) & (experts.parameters > 0)
        one_s = _unit_s(dp, dense.plus(experts.times(~are_apart)), layouts.fsdp, gathers, fabric, saved)
        more_s = _unit_s(dp, experts, np.maximum(layouts.expert_dp_shard, 1), gathers, fabric)
        blocks_s = blocks_s + position.count * (one_s + np.where(are_apart, more_s, 0.0))
    root = root.times(np.where(layouts.pp > 1, 0.5, 1.0))
    root_s = _unit_s(dp, root, layouts.fsdp, np.where(layouts.is_resharded, n, 1.0), fabric)
    return np.where(dp.sums_in_place, sums_in_place_s(dp, fabric), blocks_s / layouts.pp + root_s)


class _Unit(NamedTuple):
    """Parameters that are gathered at once, and those of them whose gradients are reduced."""

    parameters: Floats
    trained: Floats

    def plus(self, other: _Unit) -> _Unit:
        """Return both."""
        return _Unit(self.parameters + other.parameters, self.trained + other.trained)

    def times(self, factor: Floats | Bools) -> _Unit:
        """Return so many."""
        return _Unit(self.parameters * factor, self.trained * factor)


def _units(dp: DataParallel, position: BlockPosition) -> tuple[_Unit, _Unit]:
    """Return what a position has of dense parameters and of experts."""
    blocks, row = dp.work.blocks, position.row
    dense = _Unit(blocks.dense_parameters[row], blocks.trained_dense_parameters[row])
    return dense, _Unit(blocks.expert_parameters[row], blocks.trained_expert_parameters[row])


def _unit_s(
    dp: DataParallel, unit: _Unit, degree: Ints, gathers: Floats, fabric: Fabric, saved: Floats | float = 0.0
) -> Floats:
    """Return the seconds of gathering a unit so many times, `saved` bytes less, and reducing its gradients."""
    layouts = dp.layouts
    gathered, reduced = unit.parameters * dp.gather_bytes - saved, unit.trained * dp.reduce_bytes
    group = group_of(layouts.tp, degree, fabric)
    gather_s = _within_steps_s(gathered, all_gather_s(gathered, group, fabric), fabric)
    reduce_s = _within_steps_s(reduced, reduce_scatter_s(reduced, group, fabric), fabric)
    replicas = dp.replica_group(fabric)
    summed_s = all_reduce_s(reduced / degree, replicas, fabric)
    reduces = np.where(layouts.reduces_each_microbatch, dp.num_microbatches, 1.0)
    has_gradients = reduced > 0
    return np.where(degree > 1, gathers * gather_s + has_gradients * reduces * reduce_s, 0.0) + has_gradients * summed_s


def _within_steps_s(num_bytes: Floats, alone_s: Floats, fabric: Fabric) -> Floats:
    """Return the seconds of a collective as steps of FSDP2 have it, or `alone_s` where that was not measured."""
    latency_s, s_per_byte = fabric.measured.read("exchange", fabric.domain_size, fabric.measured_at)
    measured_s = latency_s + num_bytes * s_per_byte * fabric.measured_slowdown
    return np.where(np.isnan(measured_s), alone_s, measured_s)
