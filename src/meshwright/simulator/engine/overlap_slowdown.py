"""Slowdown of concurrent computation and communication.

    delay = slowdown x the seconds for which a rank computed while a communication op ran

The comm op ends later by the delay, and so does the rank's default stream: C seconds of computation over M of
communication take max(C, M) + slowdown x min(C, M), as in the planner (cost/communication/data_parallel.py) and with
the same constant. Source: Galvatron (arXiv:2211.13878); both kernels share the device's SMs and memory bandwidth.
Ignored: which operations are delayed; computation on other streams; that a delayed comm op holds its links longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Busy:
    """Busy time of a stream, from the durations of its records and the times at which they started."""

    def __init__(self, durations_s: Sequence[float], started_at: list[float]) -> None:
        self._durations_s, self._started_at = durations_s, started_at
        self._before_s = [0.0, *accumulate(durations_s)]

    def between(self, start_s: float, end_s: float) -> float:
        """Return for how many of the seconds from `start_s` to `end_s` the stream computed."""
        first = max(bisect_right(self._started_at, start_s) - 1, 0)
        after = bisect_left(self._started_at, end_s)
        if after <= first:
            return 0.0
        too_early_s = min(max(start_s - self._started_at[first], 0.0), self._durations_s[first])
        last = after - 1
        too_late_s = max(self._started_at[last] + self._durations_s[last] - end_s, 0.0)
        return max(self._before_s[after] - self._before_s[first] - too_early_s - too_late_s, 0.0)
