"""RateTable: the rate of an operation of any size, from measured points of a Device.

    log rate = multilinear in the logs of the sizes between measured points; clamped outside of them

The points of one dtype form a grid: every combination of the sizes measured along each axis. What lies between two
sizes is assumed smooth; discontinuities (cache capacity, tile quantization) are resolved only to the spacing of the
grid.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.errors import ConfigError
from meshwright.spec.machine.device import Device, Figure, MemoryOp


class RateTable:
    """Callable: rate(size of axis 0, size of axis 1, ...), arrays that broadcast."""

    def __init__(self, rates: Mapping[tuple[int, ...], float]) -> None:
        """Take the rate at each combination of sizes; raises ValueError where one is missing."""
        values = [sorted(set(sizes)) for sizes in zip(*rates, strict=True)]
        corners = list(itertools.product(*values))
        missing = [corner for corner in corners if corner not in rates]
        if missing:
            raise ValueError(f"no point at {missing[0]}")
        self._log_sizes = [np.log(np.asarray(sizes, float)) for sizes in values]
        self._log_rates = np.log([rates[corner] for corner in corners]).reshape([len(sizes) for sizes in values])

    def __call__(self, *sizes: ArrayLike) -> NDArray[np.float64]:
        """Return the rate at `sizes`, one for each axis, in the unit of the points."""
        places = [
            _between(known, np.log(np.asarray(size, float))) for known, size in zip(self._log_sizes, sizes, strict=True)
        ]
        log_rate: Any = 0.0
        # Each axis has a point below and one above: the corners of the enclosing cell, weighted by proximity.
        for corner in itertools.product((0, 1), repeat=len(places)):
            weight: Any = 1.0
            for (_, share), side in zip(places, corner, strict=True):
                weight = weight * (share if side else 1.0 - share)
            at = tuple(
                np.minimum(below + side, len(known) - 1)
                for (below, _), side, known in zip(places, corner, self._log_sizes, strict=True)
            )
            log_rate = log_rate + weight * self._log_rates[at]
        rate: NDArray[np.float64] = np.exp(log_rate)
        return rate


def matmul_rates(device: Device, dtype: str) -> RateTable | None:
    """Return FLOP/s by (rows, columns, inner) of a linear layer in `dtype`; None if not measured."""
    return _table(
        f"device {device.name}: matmul_points",
        {
            (point.num_rows, point.num_columns, point.inner): point.flops_per_s
            for point in device.matmul_points
            if point.dtype == dtype
        },
    )


def attention_rates(device: Device, dtype: str) -> tuple[RateTable | None, RateTable | None]:
    """Return FLOP/s by (seq_len, head_dim) of causal attention, forward and backward; None if not measured."""
    points = {(point.seq_len, point.head_dim): point for point in device.attention_points if point.dtype == dtype}
    field = f"device {device.name}: attention_points"
    return (
        _table(field, {size: point.forward_flops_per_s for size, point in points.items()}),
        _table(field, {size: point.backward_flops_per_s for size, point in points.items()}),
    )


def memory_op_rates(device: Device, op: MemoryOp, dtype: str) -> tuple[RateTable | None, RateTable | None]:
    """Return elements/s by the elements of `op`, forward and backward; None where it has none or is not measured."""
    points = {
        (point.num_elements,): point for point in device.memory_op_points if (point.op, point.dtype) == (op, dtype)
    }
    field = f"device {device.name}: memory_op_points"
    backward = {size: point.backward_elements_per_s for size, point in points.items()}
    return (
        _table(field, {size: point.forward_elements_per_s for size, point in points.items()}),
        _table(field, {size: figure for size, figure in backward.items() if figure is not None}),
    )


def _table(field: str, figures: Mapping[tuple[int, ...], Figure]) -> RateTable | None:
    if not figures:
        return None
    try:
        return RateTable({size: figure.value for size, figure in figures.items()})
    except ValueError as error:
        raise ConfigError(
            f"{field} of one dtype form no grid ({error}): give one point for every combination of sizes, "
            "or make the file with `meshwright calibrate`"
        ) from None


def _between(known: NDArray[np.float64], size: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the index of the known size below `size`, and how far `size` is on the way to the next, 0 to 1."""
    if len(known) == 1:
        return np.zeros(size.shape, np.intp), np.zeros(size.shape)
    below = np.clip(np.searchsorted(known, size, side="right") - 1, 0, len(known) - 2)
    share = (size - known[below]) / (known[below + 1] - known[below])
    return below, np.clip(share, 0.0, 1.0)
