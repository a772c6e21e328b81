"""MeasuredTimes: seconds of a block's kernels as they were timed on the very machine, in place of formulas.

    matmul      6 m n k / rate(m, n, k), a third of it forward
    attention   FLOPs / rate(tokens attended to, head width), and 2.5 x the FLOPs backward at a rate of their own
    memory      elements / rate(elements) of every norm, rope, gate, addition and loss, forward and backward
    host        kernels x seconds of a kernel

Source: the points in a device's catalogue entry, as `meshwright calibrate` writes them, interpolated by hardware/rates.
What was not measured is nan, and formulas hold. Ignored: that a kernel finds in the cache what the one before wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.cost.compute.op_shapes import ATTENTION_BACKWARD_FLOPS
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats
from meshwright.cost.partition import Partition
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.cost.work import Work, groups_of, moved_elements
from meshwright.hardware.rates import attention_rates, matmul_rates, memory_op_rates
from meshwright.spec.machine.device import MemoryOp
from meshwright.spec.model.op import Elementwise, Embedding, Head, Norm, Op, Rope

KERNELS_PER_OP = fixed_constant("measured_kernels_per_op")
_OPTIMIZER_OPS: tuple[MemoryOp, MemoryOp] = ("update", "clip")
_FORWARD_SHARE = 1 / (1 + fixed_constant("backward_launches"))
"""Of a block's kernels."""


MeasuredTimes = dict[str, tuple[Floats, ...]]
"""Seconds by field of BlockTimes, forward and backward, one element a row of the BlockTable: nan where its device was
not measured. reached_matmul are forward matmuls at the best rate that was measured."""


def is_measured(setup: TrainingSetup) -> bool:
    """Return whether matrix products were measured on the setup's device, in the format of its workload."""
    dtype = setup.workload.matmul_dtype
    return any(point.dtype == dtype for point in setup.cluster.device.matmul_points)


def measured_times(work: Work, setups: tuple[TrainingSetup, ...]) -> MeasuredTimes | None:
    """Return what was measured of each row's kernels; None where none of the setups' devices was measured."""
    measured = [position for position, setup in enumerate(setups) if is_measured(setup)]
    if not measured:
        return None
    of_row = work.setup_index[work.blocks.key]
    times: MeasuredTimes = {}
    for position in measured:
        here = of_row == position
        if here.any():
            for name, sides in _times_of(work, setups[position], here).items():
                known = times.get(name) or (np.full(len(here), np.nan),) * len(sides)
                times[name] = tuple(np.where(here, new, old) for new, old in zip(sides, known, strict=True))
    return times or None


def measured_update_s(configs: Configurations, num_parameters: Floats) -> Floats:
    """Return the seconds in which a rank clips and updates so many parameters; nan where that was not measured."""
    seconds = np.full(len(configs), np.nan)
    for position, setup in enumerate(configs.setups):
        (update, _), (clip, _) = (memory_op_rates(setup.cluster.device, op, "float32") for op in _OPTIMIZER_OPS)
        if update is not None and clip is not None:
            here = configs.setup_index == position
            number = num_parameters[here]
            seconds[here] = number / update(number) + number / clip(number)
    return seconds


def _times_of(work: Work, setup: TrainingSetup, here: Bools) -> MeasuredTimes:
    """Return the seconds on the setup's device; those of blocks that are not `here` mean nothing."""
    matmul, best = _matmuls(work, setup, here)
    return {
        "matmul": (matmul / 3, 2 * matmul / 3),
        "reached_matmul": (best / 3,),
        "attention": _attention(work, setup),
        "memory": _memory(work, setup, here),
        "host": _host(work, setup),
    }


def _matmuls(work: Work, setup: TrainingSetup, here: Bools) -> tuple[Floats, Floats]:
    """Return the seconds of all three products of each row's matmuls, as measured and at the best rate."""
    lines, dtype = work.matmuls, setup.workload.matmul_dtype
    rate = matmul_rates(setup.cluster.device, dtype)
    assert rate is not None
    rows = here[lines.block]
    m, n, k = (side[rows] for side in (lines.m, lines.n, lines.k))
    flops, row, num_rows = 6 * lines.groups[rows] * m * n * k, lines.block[rows], len(here)
    best = max(point.flops_per_s.value for point in setup.cluster.device.matmul_points if point.dtype == dtype)
    seconds, best_s = (np.bincount(row, one, num_rows) for one in (flops / rate(m, n, k), flops / best))
    return np.asarray(seconds, np.float64), np.asarray(best_s, np.float64)


def _attention(work: Work, setup: TrainingSetup) -> tuple[Floats, Floats]:
    blocks = work.blocks
    forward, backward = attention_rates(setup.cluster.device, setup.workload.activation_dtype)
    if forward is None or backward is None:
        unknown = np.full(len(blocks.key), np.nan)
        return unknown, unknown
    # A causal token attends to half of the sequence in the mean; blocks without attention have no FLOPs either.
    sizes = np.maximum(2 * blocks.context, 1), np.maximum(blocks.head_width, 1)
    flops = blocks.attention_flops
    return flops / forward(*sizes), ATTENTION_BACKWARD_FLOPS * flops / backward(*sizes)


def _memory(work: Work, setup: TrainingSetup, here: Bools) -> tuple[Floats, Floats]:
    device, dtype, num_rows = setup.cluster.device, setup.workload.activation_dtype, len(here)
    totals = np.zeros(num_rows), np.zeros(num_rows)
    groups = list(groups_of(setup))
    # work_of writes the blocks of one setup group by group, each with the setup's keys in order.
    for (group, _), row in zip(groups, np.flatnonzero(here).reshape(len(groups), -1), strict=True):
        partition = Partition(setup, work.keys.take(work.blocks.key[row]))
        for op, elements in _memory_ops(group.ops, partition):
            for total, rate in zip(totals, memory_op_rates(device, op, dtype), strict=True):
                total[row] += np.nan if rate is None else elements / rate(np.maximum(elements, 1))
    return totals


def _memory_ops(ops: tuple[Op, ...], partition: Partition) -> Iterator[tuple[MemoryOp, Floats]]:
    """Yield the measured operation that each op is, or is nearest to, and the elements of its result."""
    for op in ops:
        moved = moved_elements(op, partition)
        if isinstance(op, Head):
            yield "loss", partition.tokens * op.vocab_size / partition.tp
        elif isinstance(op, Norm):
            yield "norm", moved / 2
        elif isinstance(op, Rope):
            yield "rope", moved / 2
        elif isinstance(op, Embedding):
            yield "add", moved / 2
        elif isinstance(op, Elementwise):
            written = op.writes_per_token / (op.reads_per_token + op.writes_per_token)
            yield "swiglu" if op.keeps_inputs else "add", moved * written


def _host(work: Work, setup: TrainingSetup) -> tuple[Floats, Floats]:
    figure = setup.cluster.device.host_launch_s
    seconds = work.blocks.num_ops * KERNELS_PER_OP * (np.nan if figure is None else figure.value)
    return seconds * _FORWARD_SHARE, seconds * (1 - _FORWARD_SHARE)
