"""Cost of operators in profiled steps, as a line in bytes and FLOPs per operator and dtype.

    seconds = start + bytes x seconds per byte + FLOPs x seconds per FLOP        each at least 0

Fitted by least squares over all samples of an operator, weighted by count / seconds (variance proportional to time), so
that sums over a step are right. Operators with only small tensors take the median rate of all others.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.calibrator.profiled_step import OpSample, ProfiledStep
from meshwright.cost.compute.op_shapes import op_flops
from meshwright.cost.host.host_ops import dtype_of
from meshwright.units import KiB

Line = tuple[float, float, float]
"""Seconds per call, per byte, per FLOP."""

_LARGE_BYTES = 64 * KiB
_SHORTEST_S = 1e-6
_LEAST_S_PER_BYTE = 1e-14
_LEAST = 1e-30
"""Scale of a column of zeros."""


def fitted_lines(samples: Sequence[OpSample]) -> dict[tuple[str, str], Line]:
    """Return the line of each operator and dtype."""
    by_op: dict[tuple[str, str], list[OpSample]] = defaultdict(list)
    for sample in samples:
        by_op[sample.signature.op, dtype_of(sample.signature)].append(sample)
    lines = {op: _line(found) for op, found in by_op.items() if _has_large(found)}
    per_byte = [line[1] for line in lines.values() if line[1] > 0]
    usual_s = statistics.median(per_byte) if per_byte else 0.0
    small = {op: _small_line(found, usual_s) for op, found in by_op.items() if op not in lines}
    return lines | small


def exchange_line(steps: Sequence[ProfiledStep]) -> tuple[float, float]:
    """Return (latency, seconds per byte) of collectives in steps, fitted by relative error."""
    seconds = np.array([max(step.exchanges_s, _SHORTEST_S) for step in steps])
    columns = np.array([(step.num_exchanges, step.exchanged_bytes) for step in steps], np.float64)
    start_s, s_per_byte = least_squares(columns / seconds[:, None], np.ones(len(steps)))
    return max(float(start_s), _SHORTEST_S), max(float(s_per_byte), _LEAST_S_PER_BYTE)


def _has_large(samples: Sequence[OpSample]) -> bool:
    return any(_num_bytes(sample) >= _LARGE_BYTES or op_flops(sample.signature) > 0 for sample in samples)


def _num_bytes(sample: OpSample) -> float:
    return float(sample.signature.read_bytes + sample.signature.written_bytes)


def _small_line(samples: Sequence[OpSample], s_per_byte: float) -> Line:
    counts = [sample.count for sample in samples]
    starts_s = [sample.mean_s - s_per_byte * _num_bytes(sample) for sample in samples]
    return max(float(np.average(starts_s, weights=counts)), _SHORTEST_S), s_per_byte, 0.0


def _line(samples: Sequence[OpSample]) -> Line:
    seconds = np.array([sample.mean_s for sample in samples])
    weights = np.sqrt([sample.count / max(sample.mean_s, _SHORTEST_S) for sample in samples])
    columns = np.array([(1.0, _num_bytes(sample), op_flops(sample.signature)) for sample in samples])
    start_s, s_per_byte, s_per_flop = least_squares(columns * weights[:, None], seconds * weights)
    return max(start_s, _SHORTEST_S), s_per_byte, s_per_flop


def least_squares(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return non-negative least-squares coefficients [columns], by trying every subset of columns."""
    best, least = np.zeros(columns.shape[1]), float(target @ target)
    scale = np.maximum(np.abs(columns).max(axis=0), _LEAST)
    used = np.flatnonzero(columns.any(axis=0))
    for size in range(1, len(used) + 1):
        for chosen in itertools.combinations(used.tolist(), size):
            part = columns[:, chosen] / scale[list(chosen)]
            found, *_ = np.linalg.lstsq(part, target, rcond=None)
            off = part @ found - target
            if (found >= 0).all() and float(off @ off) < least:
                best, least = np.zeros(columns.shape[1]), float(off @ off)
                best[list(chosen)] = found / scale[list(chosen)]
    return best
