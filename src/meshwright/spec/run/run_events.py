"""RunEvent: what befell a run between its steps, one JSON line each in events.jsonl, for the run's goodput.

Rank 0 and the launcher append to one file, each line in one write: what was written survives the death of either.
"""

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Literal

from pydantic import ValidationError

from meshwright.spec.frozen import Frozen
from meshwright.spec.run.run import Run

EventKind = Literal["launched", "started", "checkpoint", "validation", "restore", "hang", "last seen", "ended"]
"""launched and ended are the launcher's; started is when rank 0 of an attempt has locked the run folder; checkpoint,
validation (also that on questions) and restore (of a rollback) are what training waited for; hang lasts from the last
progress of any rank until the ranks were ended for it; last seen is the newest heartbeat of an attempt, written by the
next one."""


class RunEvent(Frozen):
    """One event; events with a duration are written at their end."""

    kind: EventKind
    time_s: float
    """When it was, or when it ended, in seconds since 1970."""
    duration_s: float = 0.0
    """How long it lasted; 0 for a moment."""
    step: int | None = None
    """Optimizer steps done by then; None for events of the launcher."""

    @property
    def start_s(self) -> float:
        """Return when it began, in seconds since 1970."""
        return self.time_s - self.duration_s


def append_event(
    run: Run, kind: EventKind, *, duration_s: float = 0.0, time_s: float | None = None, step: int | None = None
) -> None:
    """Append an event to the run's file, as of `time_s`, by default now."""
    event = RunEvent(kind=kind, time_s=time.time() if time_s is None else time_s, duration_s=duration_s, step=step)
    descriptor = os.open(run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{event.model_dump_json(exclude_defaults=True)}\n".encode())
    finally:
        os.close(descriptor)


def read_events(run: Run) -> list[RunEvent]:
    """Return the run's events in the order in which they ended; empty for a run without the file."""
    try:
        lines = run.events.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(RunEvent.from_json(line))
        except ValidationError:
            continue  # a line that a full disk has cut off
    return sorted(found, key=lambda event: event.time_s)


class EventSpans:
    """The events of a few kinds as disjoint spans of time, of which several ranks may have reported the same."""

    def __init__(self, events: Iterable[RunEvent], *kinds: EventKind) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for event in sorted((one for one in events if one.kind in kinds), key=lambda one: one.start_s):
            if self._ends and event.start_s <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], event.time_s)
            else:
                self._starts.append(event.start_s)
                self._ends.append(event.time_s)

    def within(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return what lies between two times, cut off there, oldest first; moments too."""
        first, last = bisect_left(self._ends, start_s), bisect_right(self._starts, end_s)
        return [(max(start_s, self._starts[one]), min(end_s, self._ends[one])) for one in range(first, last)]

    def covered_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds between two times that the spans cover."""
        return sum(end - start for start, end in self.within(start_s, end_s))
