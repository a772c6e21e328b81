"""RestartBackoff: how long a launcher waits before it starts ranks again that failed."""

from meshwright.fault_tolerance.evidence import read_heartbeats
from meshwright.spec.run.run import Run

_LONGEST_S = 60.0


class RestartBackoff:
    """Delays before the restarts of one group of ranks.

    A restart after an attempt that reached a new step is immediate, and so is the first one after an attempt that did
    not. The next delay is `first_s`, each further one twice the last, up to 60 s or, where that is longer, `first_s`.
    """

    def __init__(self, first_s: float, furthest_step: int = 0) -> None:
        self._first_s, self._furthest_step, self._num_stuck = first_s, furthest_step, 0

    def delay_s(self, step: int) -> float:
        """Return the seconds to wait before the next attempt, where the last one ended in `step`."""
        self._num_stuck = 0 if step > self._furthest_step else self._num_stuck + 1
        self._furthest_step = max(step, self._furthest_step)
        if self._num_stuck < 2:
            return 0.0
        # A float overflows after some thousand doublings.
        doublings = min(self._num_stuck - 2, 64)
        return float(min(self._first_s * 2**doublings, max(self._first_s, _LONGEST_S)))


def furthest_step(run: Run) -> int:
    """Return the highest step that a rank was in, by the newest heartbeats; 0 before the first."""
    return max((heartbeat.step for heartbeat in read_heartbeats(run).values()), default=0)
