"""Launcher's check of the heartbeats: one warning when no rank has made progress for long."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import Evidence, look
from meshwright.log import logger
from meshwright.spec.run.diagnosis import Diagnosis
from meshwright.spec.run.rank_records import LAST_PHASES
from meshwright.spec.run.run import Run
from meshwright.units import format_duration

_POLL_S = 1.0
# Time for the ranks' watch threads to write their flight records.
_WRITING_S = 2.0
_QUIET = ("ended", "moving", "died", "failed")
"""Verdicts that the launcher reports anyway, or that are no hang."""


class HangNotice:
    """Context manager that logs one warning per hang, with the suspected rank."""

    def __init__(self, run: Run, hang_after_s: float) -> None:
        self._run, self._hang_after_s = run, hang_after_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang_notice", daemon=True)

    def __enter__(self) -> Self:
        if self._hang_after_s:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        reported_s = 0.0
        while not self._stop.wait(_POLL_S):
            evidence = look(self._run)
            moved_s = _last_moved_s(evidence)
            silent_s = evidence.now_s - moved_s
            if moved_s > reported_s and silent_s > self._hang_after_s + _WRITING_S:
                diagnosis = diagnose(evidence)
                if diagnosis.verdict not in _QUIET:
                    reported_s = moved_s
                    self._warn(diagnosis, silent_s)

    def _warn(self, diagnosis: Diagnosis, silent_s: float) -> None:
        silent, more = format_duration(silent_s), f"`meshwright diagnose {self._run.folder}` shows more"
        logger.warning("no rank has moved for %s: %s; %s", silent, diagnosis.headline, more)


def _last_moved_s(evidence: Evidence) -> float:
    """Return when a rank last made progress, in seconds since 1970; now if no rank is running."""
    alive = [one.time_s for one in evidence.heartbeats.values() if one.phase not in LAST_PHASES]
    return max(alive, default=evidence.now_s)
