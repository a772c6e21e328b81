"""Which ranks take longer than others that do the same work: a robust z-score of the logarithm of their own times.

    d(s) = ln(own time of the rank in step s / median own time of the other ranks in step s)
    z    = median of d / sqrt(standard error of that median ^ 2 + spread of the other ranks ^ 2)

Medians, and the median absolute deviation for spreads, so that a few slow steps decide nothing. Half of the steps
count, since neighbouring ones are slow together. A rank is a straggler where z, the ratio, its part of the step and the
share of slow steps are all large: a ratio alone is large in phases of microseconds, z alone where a rank is slower by a
reliable percent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_RATIO: Final = 1.3
LEAST_Z: Final = 5.0
_LARGE_RATIO: Final = 2.0
_LEAST_Z_OF_LARGE: Final = 3.5
"""A whole step that takes twice as long is seen through more noise: that of its phases averages out."""
_LEAST_SHARE: Final = 0.05
"""Of the own time of a whole step that the excess must reach."""
_LEAST_OFTEN: Final = 0.75
"""Share of steps in which the rank must be slower than the others by _SLOW_STEP."""
_SLOW_STEP: Final = 1.15
LEAST_STEPS: Final = 12
_FLOOR_S: Final = 1e-4
"""Added to times, so that those below the resolution of clocks and schedulers have no ratio."""
_MAD_TO_DEVIATION: Final = 1.4826
"""Of a normal distribution."""
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, of a normal distribution."""
_LEAST_ERROR: Final = 0.01


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others of its kind."""

    rank: int
    phase: int | None
    """Index of the phase; None where no single phase is slow enough, but the sum of all is."""
    times_slower: float
    z: float


def stragglers(own_s: Floats, peers: Sequence[Sequence[int]]) -> list[Straggler]:
    """Return the stragglers, at most one entry a rank, of times in seconds of shape [ranks, steps, phases].

    `peers` are sets of ranks that do the same work, such as those of a pipeline stage; the phase with the largest
    excess is named.
    """
    if own_s.shape[1] < LEAST_STEPS:
        return []
    whole_s = own_s.sum(axis=2)
    found = []
    for ranks in peers:
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            if others and (one := _of_rank(own_s, whole_s, rank, others)) is not None:
                found.append(one)
    return found


def _of_rank(own_s: Floats, whole_s: Floats, rank: int, others: Sequence[int]) -> Straggler | None:
    least_s = _LEAST_SHARE * float(np.median(whole_s[others]))
    by_phase = [own_s[:, :, phase] for phase in range(own_s.shape[2])]
    slow: list[tuple[float, Straggler]] = []
    for phase, times_s in [*enumerate(by_phase), (None, whole_s)]:
        median_s = np.median(times_s[others], axis=0)
        excess_s = float(np.median(times_s[rank] - median_s))
        ratio, z, often = score(times_s, rank, others)
        least_z = _LEAST_Z_OF_LARGE if phase is None and ratio >= _LARGE_RATIO else LEAST_Z
        if ratio >= LEAST_RATIO and z >= least_z and often >= _LEAST_OFTEN and excess_s >= least_s:
            slow.append((-1.0 if phase is None else excess_s, Straggler(rank, phase, ratio, z)))
    return max(slow, key=lambda one: one[0])[1] if slow else None


def score(times_s: Floats, rank: int, others: Sequence[int]) -> tuple[float, float, float]:
    """Return how many times slower `rank` is than the median of the `others`, z, and its share of slow steps.

    Of times [ranks, steps].
    """
    logs = np.log(times_s + _FLOOR_S)
    difference = _difference(logs, rank, others)
    middle = float(np.median(difference))
    error = _MEDIAN_ERROR * _deviation(difference) / math.sqrt(len(difference) / 2)
    between = 0.0
    if len(others) > 2:
        between = _deviation(np.array([np.median(_difference(logs, one, others)) for one in others]))
    often = float(np.mean(difference > math.log(_SLOW_STEP)))
    return math.exp(middle), middle / math.hypot(max(error, _LEAST_ERROR), between), often


def _difference(logs: Floats, rank: int, others: Sequence[int]) -> Floats:
    """Return how far `rank` is from the median of the `others` but itself, by step."""
    return np.asarray(logs[rank] - np.median(logs[[one for one in others if one != rank]], axis=0))


def _deviation(values: Floats) -> float:
    return _MAD_TO_DEVIATION * float(np.median(np.abs(values - np.median(values))))
