"""Lines of collectives, latency and seconds per byte, fitted to what was measured; and what is done without a fit.

    seconds = latency + bytes x seconds per byte        each at least 0, by relative error

On a busy machine larger messages may have taken no longer than small ones, or be faster than memory: no rate can be
read from those. An all-gather or a reduction of FSDP, which is the difference of two steps and so the noisiest, then
takes the line of the plain collective that it calls; a plain collective has nothing to fall back on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.calibrator.measure import Measurements
from meshwright.calibrator.op_lines import least_squares
from meshwright.calibrator.timing import NUM_BLOCKS
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
_PLAIN: dict[CollectiveKind, CollectiveKind] = {"unshard": "all-gather", "reduce-grads": "reduce-scatter"}
"""What the all-gathers and reductions of an FSDP unit call."""


@dataclass(frozen=True)
class CollectiveLines:
    """The line of each collective, and which of them are another's."""

    by_group: dict[Group, Line]
    notes: tuple[str, ...]
    """A sentence for each collective of which no rate could be read."""


def collective_lines(measured: Measurements, num_ranks: int, memory_bytes_per_s: float) -> CollectiveLines:
    """Return the lines of what `num_ranks` ranks with memory of that rate measured.

    Raises MeshwrightError where a plain collective has no rate that could be read.
    """
    most_bytes_per_s = _MOST_TIMES_MEMORY * memory_bytes_per_s
    points: dict[Group, list[tuple[int, float]]] = {}
    for (kind, ranks, num_bytes), took_s in measured.collective_s.items():
        points.setdefault((kind, ranks), []).append((num_bytes, took_s))
    lines = {group: _line(found, most_bytes_per_s) for group, found in points.items()}
    notes = list[str]()
    if missing := [group for group, line in lines.items() if line is None]:
        raise MeshwrightError(f"calibrate: {_unread(*missing[0])}: end other work on this machine, or raise --seconds")
    for kind, found in _unit_points(measured).items():
        line, plain = _line(found, most_bytes_per_s), _PLAIN[kind]
        if line is None:
            notes.append(f"{_unread(kind, num_ranks)}: it takes the line of {plain} of {num_ranks}")
            line = lines.get((plain, num_ranks)) or lines["all-gather", num_ranks]
        lines[kind, num_ranks] = line
    return CollectiveLines({group: line for group, line in lines.items() if line is not None}, tuple(notes))


def _unread(kind: str, num_ranks: int) -> str:
    return (
        f"no rate can be read from {kind} of {num_ranks}, whose time does not grow with its bytes as a message's does"
    )


def _unit_points(measured: Measurements) -> dict[CollectiveKind, list[tuple[int, float]]]:
    """Return (bytes, seconds) of an FSDP unit's all-gather and reduction, as added to a step of blocks."""
    step_s = measured.block_step_s
    sizes = sorted({num_bytes for _, num_bytes in step_s})
    # Each block is all-gathered in forward and in backward, and reduced once.
    return {
        "unshard": [(n, (step_s["gathered", n] - step_s["plain", n]) / (2 * NUM_BLOCKS)) for n in sizes],
        "reduce-grads": [(n, (step_s["reduced", n] - step_s["gathered", n]) / NUM_BLOCKS) for n in sizes],
    }


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
