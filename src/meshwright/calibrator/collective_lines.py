"""Lines of collectives, latency and seconds per byte, fitted to what was measured; and what is done without a fit.

    seconds = latency + bytes x seconds per byte        each at least 0, by relative error

On a busy machine larger messages may have taken no longer than small ones, or be faster than memory: no rate can be
read from those. An all-reduce next to computation, the difference of two timings and so the noisiest, then takes the
line of the all-reduce that is waited for at once; other collectives have nothing to fall back on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.calibrator.measure import Measurements
from meshwright.calibrator.op_lines import least_squares
from meshwright.errors import MeshwrightError
from meshwright.spec.machine.device import CollectiveKind

Line = tuple[float, float]
"""Latency, seconds, and seconds per byte."""
Group = tuple[CollectiveKind, int]
"""A collective, and its ranks."""

_SHORTEST_S = 1e-6
"""Below the resolution of a training step's clock."""
_MOST_TIMES_MEMORY = 8
"""A faster collective than so many times the device's memory is noise, since caches are not that much faster."""


@dataclass(frozen=True)
class CollectiveLines:
    """The line of each collective, and which of them are another's."""

    by_group: dict[Group, Line]
    notes: tuple[str, ...]
    """A sentence for each collective of which no rate could be read."""


def collective_lines(measured: Measurements, memory_bytes_per_s: float) -> CollectiveLines:
    """Return the lines of what ranks with memory of that rate measured.

    Raises MeshwrightError where a plain collective has no rate that could be read.
    """
    most_bytes_per_s = _MOST_TIMES_MEMORY * memory_bytes_per_s
    points: dict[Group, list[tuple[int, float]]] = {}
    for (kind, ranks, num_bytes), took_s in measured.collective_s.items():
        points.setdefault((kind, ranks), []).append((num_bytes, took_s))
    lines = {group: _line(found, most_bytes_per_s) for group, found in points.items()}
    notes = list[str]()
    for kind, ranks in [group for group, line in lines.items() if line is None]:
        if kind != "async-all-reduce":
            raise MeshwrightError(
                f"calibrate: {_unread(kind, ranks)}: end other work on this machine, or raise --seconds"
            )
        notes.append(f"{_unread(kind, ranks)}: it takes the line of all-reduce of {ranks}")
        lines[kind, ranks] = lines["all-reduce", ranks]
    return CollectiveLines({group: line for group, line in lines.items() if line is not None}, tuple(notes))


def _unread(kind: str, num_ranks: int) -> str:
    return (
        f"no rate can be read from {kind} of {num_ranks}, whose time does not grow with its bytes as a message's does"
    )


def _line(points: Sequence[tuple[int, float]], most_bytes_per_s: float) -> Line | None:
    """Return the line through (bytes, seconds); None where no rate below `most_bytes_per_s` can be read from them.

    A message faster than a smaller one, by noise, counts as equally long.
    """
    num_bytes, took_s = np.array(sorted(points), np.float64).T
    took_s = np.maximum.accumulate(took_s)
    is_real = took_s > _SHORTEST_S
    num_bytes, took_s = num_bytes[is_real], took_s[is_real]
    if len(took_s) < 2:
        return None
    columns = np.stack([1 / took_s, num_bytes / took_s], axis=1)
    latency_s, s_per_byte = least_squares(columns, np.ones(len(took_s))).tolist()
    return (max(latency_s, _SHORTEST_S), s_per_byte) if s_per_byte * most_bytes_per_s > 1 else None
