"""MeasuredTimes and HostOps: seconds of kernels and operators as timed on the very machine, in place of formulas.

    matmul      6 m n k / rate(m, n, k), a third of it forward; on an accelerator each product at the rate of its sizes
    attention   FLOPs / rate(tokens attended to, head width), and 2.5 x the FLOPs backward at a rate of their own
    memory      elements / rate(elements) of every norm, rope, gate, addition and loss, forward and backward
    host        kernels x seconds of a kernel

The last two hold for a host only. What an accelerator was timed at is eager, one kernel an operation: its compiled
blocks have fewer, and grouped matmuls are one kernel of many small ones. Formulas and simulation price both by bytes
and by tiles, at the best rate that was measured.

Source: the points in a device's catalogue entry, as `meshwright calibrate` writes them, interpolated by hardware/rates.
What was not measured is nan, and formulas hold. Ignored: that a kernel finds in the cache what the one before wrote.

HostOps: what a traced operator costs where kernels run on the host's own cores, as measured on that machine:

    seconds = start + bytes / bytes rate + FLOPs / FLOP rate        a line for each operator and format

Lines come from watched steps of training (meshwright calibrate) and hold what the host does before the operator too.
An operator that moves numbers and was not met then takes the median start and the median rate of those that were; one
that computes FLOPs is refused. Ignored: caches, which make a small tensor faster than the line, a large one slower.
"""

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.cost.compute.op_shapes import ATTENTION_BACKWARD_FLOPS, base_name, op_flops
from meshwright.cost.constants import fitted_constants, fixed_constant
from meshwright.cost.layout_table import Bools, Floats
from meshwright.cost.training_setup import Configurations, Partition, TrainingSetup
from meshwright.cost.work import Work, groups_of, moved_elements
from meshwright.errors import UnsupportedError
from meshwright.hardware.rates import attention_rates, matmul_rates, memory_op_rates
from meshwright.spec.machine.device import Device, MemoryOp, OpLine
from meshwright.spec.model.op import Elementwise, Embedding, Head, Norm, Op, Rope
from meshwright.spec.trace.trace import Signature

KERNELS_PER_OP = fixed_constant("measured_kernels_per_op")
COMPILED_LOSS = fixed_constant("compiled_loss")
JOINED_CLIP = fixed_constant("joined_clip")
_OPTIMIZER_OPS: tuple[MemoryOp, MemoryOp] = ("update", "clip")
_FORWARD_SHARE = 1 / (1 + fixed_constant("backward_launches"))
"""Of a block's kernels."""


MeasuredTimes = dict[str, tuple[Floats, ...]]
"""Seconds by field of BlockTimes, forward and backward, one element a row of the BlockTable: nan where its device was
not measured. reached_matmul are matmuls of both passes at the best rate that was measured."""


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
    """Return the seconds in which a host's rank clips and updates so many parameters; nan where that was not measured.

    On an accelerator both move their bytes at the rate at which the update was measured to (memory_share).
    """
    seconds = np.full(len(configs), np.nan)
    for position, setup in enumerate(configs.setups):
        if not setup.cluster.device.is_host:
            continue
        (update, _), (clip, _) = (memory_op_rates(setup.cluster.device, op, "float32") for op in _OPTIMIZER_OPS)
        if update is not None and clip is not None:
            here = configs.setup_index == position
            number = num_parameters[here]
            clips = JOINED_CLIP if setup.stack.joins_update else 1.0
            seconds[here] = number / update(number) + clips * number / clip(number)
    return seconds


def _times_of(work: Work, setup: TrainingSetup, here: Bools) -> MeasuredTimes:
    """Return the seconds on the setup's device; those of blocks that are not `here` mean nothing."""
    if not setup.cluster.device.is_host:
        unknown = np.full(len(here), np.nan)
        both = (unknown, unknown)
        others: MeasuredTimes = {"matmul": both, "reached_matmul": (unknown,), "memory": both, "host": both}
        return others | {"attention": _attention(work, setup)}
    matmul, best = _matmuls(work, setup, here)
    return {
        "matmul": (matmul / 3, 2 * matmul / 3),
        "reached_matmul": (best,),
        "attention": _attention(work, setup),
        "memory": _memory(work, setup, here),
        "host": _host(work, setup),
    }


def measured_products_s(work: Work, setups: Sequence[TrainingSetup]) -> list[Floats] | None:
    """Return the seconds of the three products of each line of matmuls on accelerators, forward first: nan where they
    were not measured, are grouped, or the device is a host; None where none was measured.
    """
    lines, of_line = work.matmuls, work.setup_index[work.blocks.key][work.matmuls.block]
    shapes = ((lines.m, lines.n, lines.k), (lines.m, lines.k, lines.n), (lines.k, lines.n, lines.m))
    seconds = [np.full(len(lines.m), np.nan) for _ in shapes]
    for position, setup in enumerate(setups):
        device, workload = setup.cluster.device, setup.workload
        if device.is_host or not device.matmul_points:
            continue
        own = np.where(lines.is_low, workload.matmul_dtype, workload.activation_dtype)
        dtypes = np.where(lines.is_float32, "float32", own)
        for dtype in np.unique(dtypes):
            if (rate := matmul_rates(device, str(dtype))) is not None:
                here = (of_line == position) & ~lines.is_expert & (dtypes == dtype)
                for took_s, shape in zip(seconds, shapes, strict=True):
                    m, n, k = (side[here] for side in shape)
                    took_s[here] = 2 * lines.groups[here] * m * n * k / rate(m, n, k)
    return None if np.isnan(seconds[0]).all() else seconds


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
    device = setup.cluster.device
    forward, backward = attention_rates(device, setup.workload.activation_dtype)
    # What was timed is the kernel that torch chooses; a trace does not distinguish it from cuDNN's.
    is_another = setup.attention_backend not in ("auto", "cudnn") and not device.is_host
    if forward is None or backward is None or is_another:
        unknown = np.full(len(blocks.key), np.nan)
        return unknown, unknown
    # A causal token attends to half of the sequence in the mean; blocks without attention have no FLOPs either.
    sizes = np.maximum(2 * blocks.context, 1), np.maximum(blocks.head_width, 1)
    flops = blocks.attention_flops
    passes = flops / forward(*sizes), ATTENTION_BACKWARD_FLOPS * flops / backward(*sizes)
    if device.is_host:
        return passes
    # A kernel takes its start, however small the sizes beyond those that were measured.
    start_s = np.where(flops > 0, fitted_constants()["kernel_s"], 0.0)
    return np.maximum(passes[0], start_s), np.maximum(passes[1], start_s)


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
            yield "swiglu" if op.keeps_inputs else "add", moved * written


def _host(work: Work, setup: TrainingSetup) -> tuple[Floats, Floats]:
    figure = setup.cluster.device.host_launch_s
    seconds = work.blocks.num_ops * KERNELS_PER_OP * (np.nan if figure is None else figure.value)
    return seconds * _FORWARD_SHARE, seconds * (1 - _FORWARD_SHARE)


class HostOps:
    """Prices operators on one machine."""

    def __init__(self, device: Device) -> None:
        if not device.op_lines:
            raise UnsupportedError(
                f"device {device.name} has no op_lines, the seconds of operators on this machine: "
                "run `meshwright calibrate`, which measures them"
            )
        self.device = device
        self._lines = {(line.op, line.dtype): line for line in device.op_lines}
        self._start_s = statistics.median(line.start_s.value for line in device.op_lines)
        rates = [line.bytes_per_s.value for line in device.op_lines if line.bytes_per_s is not None]
        self._s_per_byte = 1 / statistics.median(rates) if rates else 0.0

    def seconds(self, signature: Signature) -> float:
        """Return the seconds of one operator; raises UnsupportedError for FLOPs whose rate was not measured."""
        num_bytes, flops = float(signature.read_bytes + signature.written_bytes), op_flops(signature)
        line = self._lines.get((signature.op, dtype_of(signature)))
        if line is not None:
            return _on_line(line, num_bytes, flops)
        if flops > 0:
            raise UnsupportedError(
                f"{base_name(signature)} of {dtype_of(signature)} was not measured on device {self.device.name}: "
                "trace for the device `cpu`, in a format that `meshwright calibrate` measured "
                f"({', '.join(sorted({line.dtype for line in self.device.op_lines if line.flops_per_s}))})"
            )
        return self._start_s + num_bytes * self._s_per_byte


def dtype_of(signature: Signature) -> str:
    """Return the format of its first tensor."""
    shapes = (*signature.inputs, *signature.outputs)
    return shapes[0].dtype if shapes else ""


def _on_line(line: OpLine, num_bytes: float, flops: float) -> float:
    seconds = line.start_s.value
    seconds += 0.0 if line.bytes_per_s is None else num_bytes / line.bytes_per_s.value
    return seconds + (0.0 if line.flops_per_s is None else flops / line.flops_per_s.value)
