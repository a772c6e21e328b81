"""HangLimit: how long a step may stand still before the run is ended, to be started again.

    limit = run.hang_limit_s; "auto": max(20 x median of recent steps, run.hang_after_s + 60 s)

It counts from the fourth step of an attempt on, since the first ones compile, and only in the phases of a step: a
restore, a validation, a checkpoint or a sync, which waits for slower replicas, takes what it takes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from meshwright.fault_tolerance.evidence import median_step_s
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.rank_records import LAST_PHASES, Heartbeat
from meshwright.spec.run.run import Run

_USUAL_STEPS: Final = 20.0
_LEAST_EXTRA_S: Final = 60.0
NUM_WARM_UP: Final = 3
"""Steps of an attempt for which there is no limit."""
LONG_PHASES: Final = ("start", "restore", "sync", "validation", "checkpoint", "finish", *LAST_PHASES)
"""Phases without a limit."""


@dataclass(frozen=True)
class HangLimit:
    """The limit of a run."""

    run: Run
    setting_s: float | None
    """None: by the usual step."""
    hang_after_s: float

    @classmethod
    def of(cls, run: Run, section: RunSection) -> Self:
        """Return what a job's [run] asks for."""
        setting = section.hang_limit_s
        return cls(run, None if setting == "auto" else setting or math.inf, section.hang_after_s)

    @property
    def seconds(self) -> float:
        """Return the limit now; infinite where there is none."""
        if self.setting_s is not None:
            return self.setting_s
        return max(_USUAL_STEPS * median_step_s(self.run), self.hang_after_s + _LEAST_EXTRA_S)


def are_in_step(heartbeats: Iterable[Heartbeat], start_step: int) -> bool:
    """Return whether all ranks of an attempt are in a step, and none in one of the first."""
    beats = list(heartbeats)
    return bool(beats) and all(beat.phase not in LONG_PHASES and beat.step > start_step + NUM_WARM_UP for beat in beats)
