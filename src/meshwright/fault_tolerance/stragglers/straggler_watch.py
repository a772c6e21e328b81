"""StragglerWatch: gathers own times every few steps, and reports ranks that are slower than the others of their stage.

Collectives make all ranks of a step equally slow, so own times leave waits out (torch_waits.py). They are known on
processors, in eager code; elsewhere no rank is scored.
"""

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from torch import distributed as dist

from meshwright.fault_tolerance.run_findings import RunFindings
from meshwright.fault_tolerance.stragglers.phase_times import TIMED_PHASES, PhaseTimes
from meshwright.fault_tolerance.stragglers.straggler_score import Straggler, stragglers
from meshwright.parallelism.collectives import of_all_ranks
from meshwright.parallelism.torch_private.torch_waits import WaitClock
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.finding import RankFinding

_GATHERED: Final = 8
"""Steps from one gathering to the next."""
_NUM_WINDOWS: Final = 2


class StragglerWatch:
    """Scores of all ranks, on rank 0; use it in a `with`. Collectives, but for the constructor."""

    def __init__(self, times: PhaseTimes, events: RunFindings, layout: Layout, device_type: str) -> None:
        self._times, self._events, self._peers = times, events, peers_of(layout)
        is_timed = device_type == "cpu" and not layout.compiles_anything and max(map(len, self._peers)) > 1
        self._clock = WaitClock() if is_timed else None
        self._windows: deque[np.ndarray] = deque(maxlen=_NUM_WINDOWS)
        self._num_steps = 0
        self._episodes: dict[int, int] = {}
        """First step of the episode of each rank that is slow, of which the log has said so."""
        self._written: dict[int, int] = {}
        """Steps that the newest event of an episode counts."""

    def __enter__(self) -> Self:
        if self._clock is not None:
            clock = self._clock.__enter__()
            self._times.waited_s = lambda: clock.waited_s
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._clock is not None:
            self._times.waited_s = None
            self._clock.__exit__(kind, error, trace)

    def after_step(self, step: int) -> None:
        """Count a step that is done, and every few of them compare the ranks."""
        if self._clock is None:
            return
        self._num_steps += 1
        if self._num_steps % _GATHERED:
            return
        own = torch.tensor(self._times.take(_GATHERED), dtype=torch.float64)
        gathered = of_all_ranks(own)
        self._events.open()
        # The first steps of an attempt warm up.
        if self._num_steps > _GATHERED:
            self._windows.append(gathered.numpy())
        if dist.get_rank() == 0 and self._windows:
            self._judge(step, stragglers(np.concatenate(self._windows, axis=1), self._peers))

    def _judge(self, step: int, slow: Sequence[Straggler]) -> None:
        """Report new episodes, and long ones each time that they have doubled."""
        num_steps = _GATHERED * len(self._windows)
        for rank in set(self._episodes) - {one.rank for one in slow}:
            del self._episodes[rank], self._written[rank]
        for one in slow:
            first = self._episodes.setdefault(one.rank, step - num_steps + 1)
            length = step - first + 1
            if length >= 2 * self._written.get(one.rank, 0):
                event = self._event(step, one, length)
                self._events.write(event, is_logged=one.rank not in self._written)
                self._written[one.rank] = length

    def _event(self, step: int, one: Straggler, num_steps: int) -> RankFinding:
        phase, host = None if one.phase is None else TIMED_PHASES[one.phase], self._events.host(one.rank)
        where = "a step" if phase is None else phase
        return RankFinding(
            kind="straggler",
            time_s=time.time(),
            step=step,
            ranks=(one.rank,),
            hosts=(host,),
            action="none",
            what=f"rank {one.rank} ({host}) takes {one.times_slower:.1f}x as long in {where} as the median of the "
            f"other ranks, for {num_steps} steps",
            phase=phase,
            times_slower=one.times_slower,
            num_steps=num_steps,
        )


def peers_of(layout: Layout) -> list[list[int]]:
    """Return the ranks of each pipeline rank, which do the same work; pp is the outermost axis."""
    size = layout.num_ranks // layout.pp
    return [[*range(first, first + size)] for first in range(0, layout.num_ranks, size)]
