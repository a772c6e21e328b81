"""Slowdown: what computing and communicating at the same time costs both of them.

    extra = slowdown x the seconds for which a rank computed while a communication op was under way

by which the comm op ends later, and the rank's default stream goes on later from where it is: C seconds of computing
over M of communication take max(C, M) + slowdown x min(C, M), as the planner has it
(cost/communication/data_parallel.py), with the
same constant. Source: Galvatron (arXiv:2211.13878); kernels of both share a device's processors and memory. Ignored:
which of the operations it slows; what other streams compute; that a comm op which ends later holds its links longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Busy:
    """When a stream computes: the seconds of its records, and when each that was execution began."""

    def __init__(self, durations_s: Sequence[float], started_at: list[float]) -> None:
        self._durations_s, self._played_at = durations_s, started_at
        self._before_s = [0.0, *accumulate(durations_s)]

    def between(self, start_s: float, end_s: float) -> float:
        """Return for how many of the seconds from `start_s` to `end_s` the stream computed."""
        first = max(bisect_right(self._played_at, start_s) - 1, 0)
        after = bisect_left(self._played_at, end_s)
        if after <= first:
            return 0.0
        too_early_s = min(max(start_s - self._played_at[first], 0.0), self._durations_s[first])
        last = after - 1
        too_late_s = max(self._played_at[last] + self._durations_s[last] - end_s, 0.0)
        return max(self._before_s[after] - self._before_s[first] - too_early_s - too_late_s, 0.0)
