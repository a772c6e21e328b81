"""MeasuredTimes: seconds of kernels as timed on the very machine, in place of formulas; those of accelerators.

    matmul      2 m n k / rate(m, n, k) of each of the three products
    attention   FLOPs / rate(tokens attended to, head width), and 2.5 x the FLOPs backward at a rate of their own

What an accelerator was timed at is eager, one kernel an operation: its compiled blocks have fewer, and grouped matmuls
are one kernel of many small ones. Formulas and simulation price both by bytes and by tiles, at the best rate that was
measured. Those of a host: cost/host/host_block_time.py.

Source: the points in a device's catalogue entry, as `meshwright calibrate` writes them, interpolated by hardware/rates.
What was not measured is nan, and formulas hold. Ignored: that a kernel finds in the cache what the one before wrote.
"""

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.cost.blocks.work import Work
from meshwright.cost.compute.op_shapes import ATTENTION_BACKWARD_FLOPS
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Bools, Floats, Passes
from meshwright.cost.training_setup import TrainingSetup
from meshwright.hardware.rates import attention_rates, matmul_rates

MeasuredTimes = dict[str, Floats]
"""Seconds by field of BlockTimes, [forward and backward, rows of the BlockTable] or [rows] as there: nan where the
row's device was not measured. reached_matmul are matmuls of both passes at the best rate that was measured."""


def is_measured(setup: TrainingSetup) -> bool:
    """Return whether matrix products were measured on the setup's device, in the format of its workload."""
    dtype = setup.workload.matmul_dtype
    return any(point.dtype == dtype for point in setup.cluster.device.matmul_points)


def times_of_setups(
    work: Work, setups: Sequence[TrainingSetup], times_of: Callable[[Work, TrainingSetup, Bools], MeasuredTimes]
) -> MeasuredTimes:
    """Return what `times_of` a setup says of its rows, for every setup whose device was measured; else nothing."""
    of_row = work.setup_index[work.blocks.key]
    times: MeasuredTimes = {}
    for position, setup in enumerate(setups):
        here = of_row == position
        if is_measured(setup) and here.any():
            for name, seconds in times_of(work, setup, here).items():
                times[name] = np.where(here, seconds, times.get(name, np.nan))
    return times


def attention_times(work: Work, setup: TrainingSetup, here: Bools) -> MeasuredTimes:
    """Return what was measured of attention on an accelerator; that of rows not `here` means nothing."""
    # What was timed is the kernel that torch chooses; a trace does not distinguish it from cuDNN's.
    if setup.attention_backend not in ("auto", "cudnn"):
        return {}
    # A kernel takes its start, however small the sizes beyond those that were measured.
    start_s = np.where(work.blocks.attention_flops > 0, fitted_constants()["kernel_s"], 0.0)
    return {"attention": np.maximum(attention_passes(work, setup), start_s)}


def attention_passes(work: Work, setup: TrainingSetup) -> Passes:
    """Return the seconds of each row's attention at the rates of the setup's device; nan where they are unknown."""
    blocks = work.blocks
    forward, backward = attention_rates(setup.cluster.device, setup.workload.activation_dtype)
    if forward is None or backward is None:
        unknown = np.full(len(blocks.key), np.nan)
        return unknown, unknown
    # A causal token attends to half of the sequence in the mean; blocks without attention have no FLOPs either.
    sizes = np.maximum(2 * blocks.context, 1), np.maximum(blocks.head_width, 1)
    flops = blocks.attention_flops
    return flops / forward(*sizes), ATTENTION_BACKWARD_FLOPS * flops / backward(*sizes)


def measured_products_s(work: Work, setups: Sequence[TrainingSetup]) -> list[Floats] | None:
    """Return the seconds of the three products of each line of matmuls on accelerators, forward first: nan where they
    were not measured or are grouped; None where none was measured.
    """
    lines, of_line = work.matmuls, work.setup_index[work.blocks.key][work.matmuls.block]
    shapes = ((lines.m, lines.n, lines.k), (lines.m, lines.k, lines.n), (lines.k, lines.n, lines.m))
    seconds = [np.full(len(lines.m), np.nan) for _ in shapes]
    for position, setup in enumerate(setups):
        device, workload = setup.cluster.device, setup.workload
        if not device.matmul_points:
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
