"""Launcher's watch over the ranks: one warning per hang, and the end of the ranks that outlive a failed one."""

import os
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.diagnosis_text import ranks_text
from meshwright.fault_tolerance.evidence import Evidence, ask, look
from meshwright.fault_tolerance.hangs.hang_limit import HangLimit, are_in_step
from meshwright.fault_tolerance.hangs.stopped_hang import append_hang, note_hang, note_hang_until_killed, survivors_of
from meshwright.log import logger, warning_if_unwritten
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.rank_records import LAST_PHASES, Diagnosis
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event
from meshwright.units import format_duration

GRACE_S = 10.0
"""Seconds in which the other ranks end by themselves after a rank has failed; those that do not are killed."""
_POLL_S = 0.5
# Time for the ranks' watch threads to write their flight records.
_WRITING_S = 2.0
_ASKING_S = 1.0
_QUIET = ("ended", "moving", "died", "failed")
"""Verdicts that the launcher reports anyway, or that are no hang."""


class LauncherWatch:
    """Context manager that reads the ranks' heartbeats meanwhile."""

    def __init__(self, run: Run, section: RunSection) -> None:
        self._run, self._hang_after_s, self._limit = run, section.hang_after_s, HangLimit.of(run, section)
        self.killed: set[int] = set()
        """Process ids of the ranks that were killed since another one had failed."""
        self._launched_s: float | None = time.time()
        """When the launcher began; None once it is among the run's events."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launcher_watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._note_launch()
        if self._launched_s is None:
            with suppress(OSError):  # a full disk; the run has ended as it has
                append_event(self._run, "ended")

    def note_stop(self) -> None:
        """Record a hang that a signal to the launcher ends: at once, since a scheduler may kill the launcher next."""
        note_hang(self._run, [self._run])

    def note_stopped(self, asked_s: float, killed: Collection[int]) -> None:
        """Record that the ranks which had to be `killed`, process ids, had not moved since they were asked to stop.

        `asked_s` is when, in seconds since 1970.
        """
        note_hang_until_killed(self._run, self._run, asked_s, killed)

    def _note_launch(self) -> None:
        """Write when the launcher began, once the ranks have made the run folder."""
        if self._launched_s is not None and self._run.events.exists():
            with suppress(OSError):  # a full disk is no reason to end the watch
                append_event(self._run, "launched", time_s=self._launched_s)
                self._launched_s = None

    def _watch(self) -> None:
        reported_s = 0.0
        while not self._stop.wait(_POLL_S):
            self._note_launch()
            evidence = look(self._run)
            moved_s = _last_moved_s(evidence)
            silent_s = evidence.now_s - moved_s
            if survivors_of(evidence) and (self._run.failure.exists() or _has_died(evidence)):
                self._end_survivors()
            elif self._is_hung(evidence, silent_s):
                self._end_hung()
            elif moved_s > reported_s and 0 < self._hang_after_s < silent_s - _WRITING_S:
                diagnosis = diagnose(evidence)
                if diagnosis.verdict not in _QUIET:
                    reported_s = moved_s
                    self._warn(diagnosis, silent_s)

    def _warn(self, diagnosis: Diagnosis, silent_s: float) -> None:
        silent, more = format_duration(silent_s), f"`meshwright diagnose {self._run.folder}` shows more"
        logger.warning("no rank has moved for %s: %s; %s", silent, diagnosis.headline, more)

    def _is_hung(self, evidence: Evidence, silent_s: float) -> bool:
        alive = [evidence.heartbeats[rank] for rank in survivors_of(evidence)]
        return are_in_step(alive, evidence.start_step) and silent_s > self._limit.seconds

    def _end_hung(self) -> None:
        """Kill all ranks of this host, with a diagnosis of what they were in."""
        ask(self._run, _ASKING_S)
        # Whatever a slow step is to `diagnose`: what is silent for longer than the limit hangs.
        evidence = replace(look(self._run), slow_s=0.0)
        silent_s = evidence.now_s - _last_moved_s(evidence)
        # A rank may have moved on meanwhile.
        if self._is_hung(evidence, silent_s):
            self._kill(survivors_of(evidence), evidence, f"no rank had moved for {format_duration(silent_s)}")

    def _end_survivors(self) -> None:
        """Kill the ranks of this host that do not end within GRACE_S, with a diagnosis of what they were in."""
        deadline_s = time.monotonic() + GRACE_S
        # Of a rank that was killed, only the launcher knows.
        with warning_if_unwritten(self._run.failure):
            self._run.failure.touch()
        ask(self._run, GRACE_S)
        while (survivors := survivors_of(evidence := look(self._run))) and time.monotonic() < deadline_s:
            self._stop.wait(0.2)
        if not survivors:
            return
        ended = f"{ranks_text(survivors)} did not end within {GRACE_S:.0f} s after another rank had failed"
        self._kill(survivors, evidence, f"{ended}, and was killed")

    def _kill(self, survivors: list[int], evidence: Evidence, why: str) -> None:
        """Kill ranks of this host, and keep the diagnosis, which is lost with them."""
        diagnosis = diagnose(evidence)
        logger.error("%s: %s", why, diagnosis.headline)
        advice = "Correct what held it up, then start the same command with --resume."
        kept = diagnosis.replace(evidence=[*diagnosis.evidence, why], advice=advice)
        with warning_if_unwritten(self._run.last_diagnosis):
            self._run.last_diagnosis.write_text(kept.to_json(), encoding="utf-8")
        moved_s = _last_moved_s(evidence)
        for rank in survivors:
            self.killed.add(evidence.heartbeats[rank].pid)
            with suppress(ProcessLookupError):
                os.kill(evidence.heartbeats[rank].pid, signal.SIGKILL)
        append_hang(self._run, moved_s)


def last_diagnosis(run: Run, evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis before the launcher killed ranks; None if it killed none, or one is alive again."""
    if survivors_of(evidence):
        return None
    with suppress(OSError, ValidationError):
        return Diagnosis.from_json(run.last_diagnosis.read_text(encoding="utf-8"))
    return None


def _has_died(evidence: Evidence) -> bool:
    gone = [rank for rank, state in evidence.processes.items() if state == "gone"]
    return any(evidence.heartbeats[rank].phase not in LAST_PHASES for rank in gone)


def _last_moved_s(evidence: Evidence) -> float:
    """Return when a rank last made progress, in seconds since 1970; now if no rank is running."""
    alive = [one.time_s for one in evidence.heartbeats.values() if one.phase not in LAST_PHASES]
    return max(alive, default=evidence.now_s)
