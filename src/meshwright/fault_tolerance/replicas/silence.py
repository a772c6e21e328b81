"""Silence: which replica holds up the others, from what their ranks have begun.

Rank k of each replica sums with rank k of the others, in one order. When nothing has moved for the limit, a replica
that has begun fewer sums than another, in any of its ranks, is the one that is waited for: its own hung rank, or ranks
of it that wait for that one. A replica that is merely waiting is never behind, since it waits only for others. One
whose process does not answer at all, frozen or cut off from the network, is that replica, whatever the counts say:
across a cut, a sum may be done on one side only. So are all of them where all are frozen: no replica is left to wait.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_USUAL_STEPS: Final = 20.0
_LEAST_QUORUMS: Final = 2.0
_ANSWERS_WITHIN_S: Final = 2.5
"""Ranks are asked every second."""
_NUM_WARM_UP: Final = 3
"""Steps of a replica's life for which only the long limit counts: it compiles, and allocates."""


class GivenUp(NamedTuple):
    """Why a replica is given up."""

    why: str
    held_up_s: float
    """Seconds for which it has held up the others."""


@dataclass
class Pulse:
    """What one replica has begun, by rank."""

    begun: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    """Quorums that it was part of."""
    in_long_phase: set[int] = field(default_factory=set)
    """Ranks that save, validate or restore, which takes what it takes."""
    moved_s: float = field(default_factory=time.monotonic)
    heard_s: dict[int, float] = field(default_factory=dict)
    """When each rank last answered: a thread of its process does, whatever its training loop is in."""

    def begin_sum(self, rank: int) -> None:
        """Note that a rank begins a sum, or is ready for a step."""
        self.begun[rank] = self.begun.get(rank, 0) + 1
        self.moved_s = time.monotonic()

    def enter(self, rank: int, *, is_long: bool) -> None:
        """Note that a rank enters a phase that takes longer, or leaves one."""
        (self.in_long_phase.add if is_long else self.in_long_phase.discard)(rank)
        self.moved_s = time.monotonic()

    def hear(self, rank: int) -> None:
        """Note that the process of a rank runs."""
        self.heard_s[rank] = time.monotonic()

    def forgive(self) -> None:
        """Count from now: the one who listens was itself away."""
        self.moved_s = time.monotonic()
        self.heard_s = dict.fromkeys(self.heard_s, self.moved_s)

    def restart_count(self) -> None:
        """Count from 0 again, as all members of a quorum do."""
        self.begun = dict.fromkeys(self.begun, 0)
        self.num_steps += 1
        self.in_long_phase.clear()
        self.moved_s = time.monotonic()

    def mute_s(self, now_s: float) -> float:
        """Return the seconds since the rank that was silent for longest has answered."""
        return now_s - min(self.heard_s.values(), default=now_s)


class Silence:
    """The limit of a run, and who has exceeded it."""

    def __init__(self, limit_s: float | None, least_s: float, longest_s: float, steps_between_quorums: int = 1) -> None:
        """A `limit_s` of None is 20 usual steps, `least_s` or more; `longest_s` counts in phases that may be long.

        It is two quorums at least, where replicas train for several steps between them.
        """
        self._limit_s, self._least_s, self._longest_s = limit_s, least_s, longest_s
        self._num_usual = max(_LEAST_QUORUMS, _USUAL_STEPS / steps_between_quorums)
        self._steps_s: deque[float] = deque(maxlen=20)

    def add_step(self, step_s: float) -> None:
        """Note how long it took from one quorum to the next."""
        self._steps_s.append(step_s)

    @property
    def limit_s(self) -> float:
        """Return the limit in a step now."""
        if self._limit_s is not None:
            return min(self._limit_s, self._longest_s)
        usual_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        return min(max(self._num_usual * usual_s, self._least_s), self._longest_s)

    def culprits(self, pulses: Mapping[int, Pulse], ready: Mapping[int, object], now_s: float) -> dict[int, GivenUp]:
        """Return the members of a quorum that hold up the others, or are frozen as all are, and why they are accused.

        None where all wait. `now_s` is on the clock of time.monotonic.
        """
        if not pulses:
            return {}
        silent_s = now_s - max(pulse.moved_s for pulse in pulses.values())
        mute_s = {replica: pulse.mute_s(now_s) for replica, pulse in pulses.items()}
        mute = {replica for replica, since_s in mute_s.items() if since_s > _ANSWERS_WITHIN_S}
        if mute:
            # Frozen, or cut off: whatever it was in, and whatever it has begun. Where none answers, some may
            # only lack a core for a moment.
            limit_s = self.limit_s + (_ANSWERS_WITHIN_S if len(mute) == len(pulses) else 0.0)
            frozen = {replica for replica in mute if min(silent_s, mute_s[replica]) > limit_s}
            return {replica: _no_answer(mute_s[replica]) for replica in frozen}
        behind = {replica for replica in pulses if replica not in ready} if ready else self._behind(pulses)
        return {
            replica: GivenUp(f"it has held up the others for {silent_s:.1f} s", silent_s)
            for replica in behind
            if len(behind) < len(pulses) and silent_s > self._limit_of(pulses[replica])
        }

    def frozen(self, pulses: Mapping[int, Pulse], now_s: float) -> dict[int, GivenUp]:
        """Return the replicas in no quorum whose processes have not answered for the long limit: no one waits for them.

        Such one loads, or compiles, and would never be ready.
        """
        mute_s = {replica: pulse.mute_s(now_s) for replica, pulse in pulses.items()}
        return {replica: _no_answer(since_s) for replica, since_s in mute_s.items() if since_s > self._longest_s}

    def _limit_of(self, pulse: Pulse) -> float:
        is_long = bool(pulse.in_long_phase) or pulse.num_steps <= _NUM_WARM_UP
        return self._longest_s if is_long else self.limit_s

    def _behind(self, pulses: Mapping[int, Pulse]) -> set[int]:
        ranks = {rank for pulse in pulses.values() for rank in pulse.begun}
        furthest = {rank: max(pulse.begun.get(rank, 0) for pulse in pulses.values()) for rank in ranks}
        return {
            replica
            for replica, pulse in pulses.items()
            if any(pulse.begun.get(rank, 0) < most for rank, most in furthest.items())
        }


def _no_answer(mute_s: float) -> GivenUp:
    return GivenUp(f"its process has not answered for {mute_s:.1f} s", mute_s)
