"""Timing of calls that all ranks make at the same time.

Ranks of one machine share memory bandwidth, caches and power, so a rank alone is faster than in training. All ranks
start each measurement together and make as many calls as the slowest rank has time for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.units import MiB

_MOST_SAMPLES, _MOST_CALLS = 200, 1000
_CLOCK_TICK_S = 1e-9
# More than the caches of one core; shared caches may still hit, as in training.
_COLD_BYTES, _MOST_COPIES = 16 * MiB, 16


@dataclass(frozen=True)
class Stopwatch:
    """Timer of calls on `device`, with about `budget_s` per measurement."""

    device: torch.device
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    """Clock in seconds. Thread time excludes other programs, for kernels on the CPU; only wall time includes waits for
    other ranks."""
    shortest_sample_s: float = 2e-3
    """Minimum duration of a sample, the mean of equal calls, so that clock and synchronization overheads are
    negligible."""

    def seconds(self, *calls: Callable[[], object]) -> float:
        """Return the seconds of a call on this rank; a collective: all ranks time the same call.

        `calls` do equal work on separate memory, in turn, and their results are kept for a while, so that inputs and
        outputs are not in the caches, as in a model.
        """
        cycle = _CallCycle(calls)
        for _ in calls:
            first_s = self._sample(cycle, 1)
        num_calls = min(self._agree(self.shortest_sample_s / first_s), _MOST_CALLS)
        num_samples = min(self._agree(self.budget_s / (num_calls * first_s)), _MOST_SAMPLES)
        dist.barrier()
        return statistics.median(self._sample(cycle, num_calls) for _ in range(num_samples))

    def copies(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield `tensors` and copies of them that together exceed a core's caches."""
        yield tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        for _ in range(min(_COLD_BYTES // num_bytes, _MOST_COPIES)):
            yield tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)

    def _sample(self, cycle: _CallCycle, num_calls: int) -> float:
        self._wait()
        started_s = self.clock()
        for _ in range(num_calls):
            cycle.call()
        self._wait()
        return max(self.clock() - started_s, _CLOCK_TICK_S) / num_calls

    def _agree(self, wanted: float) -> int:
        """Return the smallest count of all ranks, at least 1; a collective."""
        count = torch.tensor(max(1, round(wanted)), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        return int(count)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _CallCycle:
    """Cycle of calls that keeps the latest result of each."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._next = itertools.cycle(calls)
        self._kept: deque[object] = deque(maxlen=len(calls))

    def call(self) -> None:
        self._kept.append(next(self._next)())
