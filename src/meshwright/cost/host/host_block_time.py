"""HostBlockPricer: seconds of a block's passes as timed on a host's own cores, in place of formulas.

    matmul      6 m n k / rate(m, n, k), a third of it forward
    attention   FLOPs / rate(tokens attended to, head width), and 2.5 x the FLOPs backward at a rate of their own
    memory      elements / rate(elements) of every norm, rope, gate, addition and loss, forward and backward; an eager
                mixture's elements at the rate of additions (own_elements.py)
    host        kernels x seconds of a kernel

Source: the points in a device's catalogue entry, as `meshwright calibrate` writes them, interpolated by hardware/rates.
What was not measured is nan, and formulas hold. Ignored: that a kernel finds in the cache what the one before wrote.
"""

import math
from collections.abc import Iterator

import numpy as np

from meshwright.cost.blocks.work import Work, groups_of, moved_elements
from meshwright.cost.compute.block_time import BlockPricer, formula_launch_s
from meshwright.cost.compute.measured_kernels import MeasuredTimes, attention_passes, times_of_setups
from meshwright.cost.compute.own_elements import is_eager
from meshwright.cost.constants import Constants, fixed_constant
from meshwright.cost.layout_table import Bools, Floats, Passes
from meshwright.cost.training_setup import Partition, TrainingSetup
from meshwright.hardware.rates import matmul_rates, memory_op_rates
from meshwright.spec.machine.device import MemoryOp
from meshwright.spec.model.op import Elementwise, Embedding, Head, Norm, Op, Rope

_ADAPTER_KERNELS = 9.0
"""Of an adapter, forward and backward: six products, a scale, the sum of outputs and that of input gradients."""
KERNELS_PER_OP = fixed_constant("measured_kernels_per_op")
MIXTURE_KERNELS = fixed_constant("measured_mixture_kernels")
COMPILED_LOSS = fixed_constant("compiled_loss")
_FORWARD_SHARE = 1 / (1 + fixed_constant("backward_launches"))
"""Of a block's kernels."""


class HostBlockPricer(BlockPricer):
    """Prices blocks on hosts."""

    def _measured(self) -> tuple[MeasuredTimes, None]:
        return times_of_setups(self.work, self.setups, _times_of), None

    def _launch_s(self, setup: TrainingSetup, constants: Constants) -> float:
        return formula_launch_s(setup.stack, constants)


def _times_of(work: Work, setup: TrainingSetup, here: Bools) -> MeasuredTimes:
    """Return the seconds on the setup's device; those of blocks that are not `here` mean nothing."""
    matmul, best = _matmuls(work, setup, here)
    return {
        "matmul": np.stack((matmul / 3, 2 * matmul / 3)),
        "reached_matmul": best,
        "attention": np.stack(attention_passes(work, setup)),
        "memory": np.stack(_memory(work, setup, here)),
        "host": np.stack(_host(work, setup)),
    }


def _matmuls(work: Work, setup: TrainingSetup, here: Bools) -> tuple[Floats, Floats]:
    """Return the seconds of all three products of each row's matmuls, as measured and at the best rate."""
    lines, dtype = work.matmuls, setup.workload.matmul_dtype
    rate = matmul_rates(setup.cluster.device, dtype)
    assert rate is not None
    rows = here[lines.block]
    m, n, k = (side[rows] for side in (lines.m, lines.n, lines.k))
    num_products = 1 + lines.has_input_gradient[rows] + 1.0 * lines.has_weight_gradient[rows]
    flops, row, num_rows = 2 * num_products * lines.groups[rows] * m * n * k, lines.block[rows], len(here)
    best = max(point.flops_per_s.value for point in setup.cluster.device.matmul_points if point.dtype == dtype)
    seconds, best_s = (np.bincount(row, one, num_rows) for one in (flops / rate(m, n, k), flops / best))
    return np.asarray(seconds, np.float64), np.asarray(best_s, np.float64)


def _memory(work: Work, setup: TrainingSetup, here: Bools) -> Passes:
    device, dtype, num_rows = setup.cluster.device, setup.workload.activation_dtype, len(here)
    totals = np.zeros(num_rows), np.zeros(num_rows)
    groups = list(groups_of(setup))
    # work_of writes the blocks of one setup group by group, each with the setup's keys in order.
    for (group, _), row in zip(groups, np.flatnonzero(here).reshape(len(groups), -1), strict=True):
        partition = Partition(setup, work.keys.take(work.blocks.key[row]))
        for op, elements in _memory_ops(group.ops, partition):
            for total, rate in zip(totals, memory_op_rates(device, op, dtype), strict=True):
                total[row] += np.nan if rate is None else elements / rate(np.maximum(elements, 1))
    add, _ = memory_op_rates(device, "add", dtype)
    eager = work.blocks.eager_forward_elements, work.blocks.eager_backward_elements
    # What an eager mixture moves was not timed as one operation; an addition reads an element and writes one.
    eager_s = (np.nan if add is None else moved / 2 / add(np.maximum(moved / 2, 1)) for moved in eager)
    forward, backward = (total + seconds for total, seconds in zip(totals, eager_s, strict=True))
    return forward, backward


def _memory_ops(ops: tuple[Op, ...], partition: Partition) -> Iterator[tuple[MemoryOp, Floats]]:
    """Yield the measured operation that each op is, or is nearest to, and the elements of its result."""
    compiled = 1 - is_eager(ops, partition)
    for op in ops:
        moved = moved_elements(op, partition)
        if isinstance(op, Head):
            share = COMPILED_LOSS if partition.compiles_loss else 1.0
            yield "loss", share * partition.tokens * op.vocab_size / partition.tp
        elif isinstance(op, Norm):
            yield "norm", moved / 2
        elif isinstance(op, Rope):
            yield "rope", moved / 2
        elif isinstance(op, Embedding):
            yield "add", moved / 2
        elif isinstance(op, Elementwise):
            written = op.writes_per_token / (op.reads_per_token + op.writes_per_token)
            # An eager mixture's are among its own elements.
            kept = compiled if op.part == "experts" else 1.0
            yield "swiglu" if op.keeps_inputs else "add", kept * moved * written


def _host(work: Work, setup: TrainingSetup) -> Passes:
    kernels = work.blocks.num_ops * KERNELS_PER_OP + work.blocks.num_adapters * _ADAPTER_KERNELS
    kernels = kernels + (work.blocks.eager_forward_elements > 0) * MIXTURE_KERNELS
    seconds = kernels * launch_s(setup)
    return seconds * _FORWARD_SHARE, seconds * (1 - _FORWARD_SHARE)


def launch_s(setup: TrainingSetup) -> float:
    """Return the host's own seconds of a kernel; nan where they were not measured."""
    figure = setup.cluster.device.host_launch_s
    return math.nan if figure is None else figure.value
