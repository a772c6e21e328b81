"""HangNotice: the launcher's look at its ranks' heartbeats: one line when none of them has moved for long."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import Evidence, look
from meshwright.log import logger
from meshwright.spec.run.diagnosis import Diagnosis
from meshwright.spec.run.heartbeat import LAST_PHASES
from meshwright.spec.run.run import Run
from meshwright.units import format_duration

_LOOK_S = 1.0
# Time for the ranks' own watches to write what the line is made of.
_WRITING_S = 2.0
_QUIET = ("ended", "moving", "died", "failed")
"""What the launcher tells anyway, or what is no hang."""


class HangNotice:
    """Says once for each hang, while it is entered, which rank seems stuck; it changes nothing."""

    def __init__(self, run: Run, hang_after_s: float) -> None:
        self._run, self._hang_after_s = run, hang_after_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hang_notice", daemon=True)

    def __enter__(self) -> Self:
        if self._hang_after_s:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        told_of_s = 0.0
        while not self._over.wait(_LOOK_S):
            evidence = look(self._run)
            moved_s = _last_moved_s(evidence)
            silent_s = evidence.now_s - moved_s
            if moved_s > told_of_s and silent_s > self._hang_after_s + _WRITING_S:
                diagnosis = diagnose(evidence)
                if diagnosis.verdict not in _QUIET:
                    told_of_s = moved_s
                    self._tell(diagnosis, silent_s)

    def _tell(self, diagnosis: Diagnosis, silent_s: float) -> None:
        silent, more = format_duration(silent_s), f"`meshwright diagnose {self._run.folder}` tells more"
        logger.warning("no rank has moved for %s: %s; %s", silent, diagnosis.headline, more)


def _last_moved_s(evidence: Evidence) -> float:
    """Return when a rank last moved, in seconds since 1970; now where none is in the run."""
    alive = [one.time_s for one in evidence.heartbeats.values() if one.phase not in LAST_PHASES]
    return max(alive, default=evidence.now_s)
