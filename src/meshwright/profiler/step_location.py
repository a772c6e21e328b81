"""Phase, pipeline action and module of the host at a time in a step, from the marks in its profile."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.profiler.chrome_trace import MARK, Event
from meshwright.spec.layout.schedule.action import ACTION_MARK, parse_action
from meshwright.spec.trace.marks import AXIS_MARK

_BACKWARD_NODE = "autograd::engine::evaluate_function"
_FSDP = "FSDP::"
_OF_MODULE = re.compile(r"FSDP::(\w+) \((.*)\)")
_MOST_NESTED = 16
"""Upper bound of nested marks."""


class StepLocation(NamedTuple):
    """Location of an event in a step."""

    phase: str
    action: str
    scope: str


class StepLocations:
    """Locations of the events of one step of a rank."""

    def __init__(self, events: Sequence[Event]) -> None:
        marks = [event for event in events if event.category == MARK]
        self._actions = _Intervals(mark for mark in marks if mark.name.startswith(ACTION_MARK))
        backwards = [mark for mark in self._actions.events if not _is_forward(mark)]
        self._backwards = _Intervals(event for event in events if event.name.startswith(_BACKWARD_NODE))
        self._actions_back = _Intervals(backwards)
        ends = [event.end_ns for event in (*self._backwards.events, *self._actions.events)]
        self._last_end_ns = max(ends, default=None)
        self._axis_marks = _Intervals(mark for mark in marks if mark.name.startswith(AXIS_MARK))
        self._fsdp_marks = _Intervals(mark for mark in marks if mark.name.startswith(_FSDP))
        self._changes = sorted(_changes_of_scope(self._fsdp_marks.events))

    def at(self, event: Event) -> StepLocation:
        """Return the location of a host event."""
        action = self._actions.enclosing(event.start_ns)
        text = "" if action is None else action.name.removeprefix(ACTION_MARK)
        before = bisect_right(self._changes, (event.start_ns, "\uffff"))
        return StepLocation(self._phase(event), text, self._changes[before - 1][1] if before else "")

    def _phase(self, event: Event) -> str:
        moment_ns = event.start_ns
        if self._backwards.enclosing(moment_ns):
            # torch numbers ops that autograd records; inside of a backward those are recomputation.
            return "recompute" if "Sequence number" in event.args else "backward"
        if self._actions_back.enclosing(moment_ns):
            return "backward"
        return "forward" if self._last_end_ns is None or moment_ns < self._last_end_ns else "optimizer"

    def group_description(self, moment_ns: int) -> str | None:
        """Return the description of the process group in the runtime's mark, or None."""
        mark = self._axis_marks.enclosing(moment_ns)
        return None if mark is None else mark.name.removeprefix(AXIS_MARK)

    def fsdp_mark(self, moment_ns: int) -> str | None:
        """Return torch's innermost FSDP2 mark, or None."""
        mark = self._fsdp_marks.enclosing(moment_ns)
        return None if mark is None else mark.name

    @property
    def actions(self) -> tuple[str, ...]:
        """Return the actions of the step, in order."""
        return tuple(mark.name.removeprefix(ACTION_MARK) for mark in self._actions.events)


class _Intervals:
    """Events sorted by start, possibly nested."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self._starts = [event.start_ns for event in self.events]

    def enclosing(self, moment_ns: int) -> Event | None:
        """Return the innermost event at a time, or None."""
        after = bisect_right(self._starts, moment_ns)
        near = reversed(self.events[max(after - _MOST_NESTED, 0) : after])
        return next((event for event in near if moment_ns < event.end_ns), None)


def _is_forward(mark: Event) -> bool:
    return parse_action(mark.name.removeprefix(ACTION_MARK)).kind.endswith("F")


def _changes_of_scope(marks: Iterable[Event]) -> Iterable[tuple[int, str]]:
    """Yield (time, module that runs from then on), from FSDP2's pre-hook to the end of the last post-hook."""
    for mark in marks:
        if found := _OF_MODULE.fullmatch(mark.name):
            what, module = found.groups()
            if what.startswith("pre_"):
                yield mark.start_ns, module
            elif what.startswith("post_"):
                yield mark.start_ns, module
                yield mark.end_ns, ""
