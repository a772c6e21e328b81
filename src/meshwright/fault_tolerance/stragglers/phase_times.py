"""PhaseTimes: seconds that the training loop of one rank spends in each phase of a step without waiting for others."""

import time
from collections.abc import Callable

from meshwright.spec.layout.schedule.action import ACTION_MARK, parse_action

TIMED_PHASES = ("data", "forward", "backward", "gradients", "optimizer")
"""Phases in which all ranks of a pipeline stage do the same work."""


def phase_of(mark: str) -> str:
    """Return the phase of a step, as in spec/fault.py, that a mark of the training loop belongs to."""
    if not mark.startswith(ACTION_MARK):
        return mark
    return "forward" if parse_action(mark.removeprefix(ACTION_MARK)).kind.endswith("F") else "backward"


class PhaseTimes:
    """Own times of the steps since they were last taken."""

    def __init__(self) -> None:
        self.waited_s: Callable[[], float] | None = None
        """Returns the seconds that this thread has waited for others; None, and nothing is timed, where unknown."""
        self._steps: list[dict[str, float]] = []
        self._phase_of: dict[str, str] = {}
        self._phase, self._began_s = "", 0.0

    def begin_step(self) -> None:
        """Start a step, in no phase yet."""
        if self.waited_s is not None:
            self.enter("")
            self._steps.append({})

    def enter(self, mark: str) -> None:
        """Start the phase of a mark, and end the one before."""
        if self.waited_s is None:
            return
        now_s = time.perf_counter() - self.waited_s()
        if self._steps and self._phase:
            own = self._steps[-1]
            own[self._phase] = own.get(self._phase, 0.0) + now_s - self._began_s
        phase = self._phase_of.get(mark)
        if phase is None:
            phase = self._phase_of[mark] = phase_of(mark)
        self._phase, self._began_s = phase, now_s

    def take(self, num_steps: int) -> list[list[float]]:
        """Return the seconds of each of TIMED_PHASES in the newest steps, oldest first, and forget all steps."""
        newest, self._steps = self._steps[-num_steps:], []
        return [[step.get(phase, 0.0) for phase in TIMED_PHASES] for step in newest]
