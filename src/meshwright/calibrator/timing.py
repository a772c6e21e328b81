"""Stopwatch: seconds of one call while every rank makes the same call.

Ranks of one machine share its memory bandwidth, caches and power: what one of them reaches alone, it does not reach in
training. So all ranks start each measurement together and make as many calls as the slowest has time for.
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
# More than the caches of one core hold; what all cores share may still have it, as in training.
_COLD_BYTES, _MOST_COPIES = 16 * MiB, 16


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on `device`, giving each of them about `budget_s`."""

    device: torch.device
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    """What tells the seconds. The thread's own time stands still while another program has the core, and so does for
    kernels that run on it; only the wall's counts what ranks wait for each other."""
    shortest_sample_s: float = 2e-3
    """Seconds that a sample, the mean of equal calls, has at least: so that reading the clock, and waiting for an
    accelerator, is no part of it."""

    def seconds(self, *calls: Callable[[], object]) -> float:
        """Return the seconds of a call on this rank; a collective: every rank times the same at once.

        `calls` do equal work on memory of their own, each in turn, and what they return is kept for a while: in a
        model, too, an operation meets data that the caches have lost, and puts its result where nothing was.
        """
        turns = _Turns(calls)
        for _ in calls:
            first_s = self._sample(turns, 1)
        num_calls = min(self._agree(self.shortest_sample_s / first_s), _MOST_CALLS)
        num_samples = min(self._agree(self.budget_s / (num_calls * first_s)), _MOST_SAMPLES)
        dist.barrier()
        return statistics.median(self._sample(turns, num_calls) for _ in range(num_samples))

    def copies(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield `tensors`, and copies of them, until a core's caches cannot hold them all."""
        yield tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        for _ in range(min(_COLD_BYTES // num_bytes, _MOST_COPIES)):
            yield tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)

    def _sample(self, turns: _Turns, num_calls: int) -> float:
        self._wait()
        started_s = self.clock()
        for _ in range(num_calls):
            turns.call()
        self._wait()
        return max(self.clock() - started_s, _CLOCK_TICK_S) / num_calls

    def _agree(self, wanted: float) -> int:
        """Return the smallest count that any rank wants, at least 1: collectives need the same on all."""
        count = torch.tensor(max(1, round(wanted)), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        return int(count)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Turns:
    """Makes calls one after the other, over and over, and keeps the latest result of each."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._next = itertools.cycle(calls)
        self._kept: deque[object] = deque(maxlen=len(calls))

    def call(self) -> None:
        self._kept.append(next(self._next)())
