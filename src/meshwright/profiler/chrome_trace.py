"""One rank's torch.profiler trace in Chrome's trace format, where in a step the host is at a time, and spans of it."""

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import ConfigError
from meshwright.spec.layout.schedule.action import ACTION_MARK, parse_action
from meshwright.spec.trace.timeline import AXIS_MARK, MODULE_MARK, STEP_MARK, Floats, SpanKind, Spans

ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATOR, MARK = ON_HOST[:2]


class Event(NamedTuple):
    """One event with a duration."""

    name: str
    category: str
    """The profiler's category: cpu_op, user_annotation, kernel, ..."""
    thread: int
    start_ns: int
    """On the clock of the rank's host."""
    end_ns: int
    args: dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """One rank's profile."""

    rank: int
    world_size: int
    host: str
    torch_version: str
    groups: dict[str, tuple[int, ...]]
    """Global ranks of this rank's process groups, by description; the default group is not listed."""
    events: list[Event]
    """Sorted by start; an enclosing event precedes the enclosed ones."""

    def steps(self) -> dict[int, Event]:
        """Return the marks of steps, by step."""
        marks = (event for event in self.events if event.category == MARK and event.name.startswith(STEP_MARK))
        return {int(mark.name.removeprefix(STEP_MARK)): mark for mark in marks}

    def between(self, start_ns: int, end_ns: int) -> list[Event]:
        """Return the events that start in an interval."""
        return [event for event in self.events if start_ns <= event.start_ns < end_ns]


def read_chrome_trace(file: Path) -> RankTrace:
    """Return the profile in `file` (.json or .json.gz); raises ConfigError if it is none."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            trace = json.load(stream)
        distributed = trace.get("distributedInfo", {})
        events = list(_events(trace["traceEvents"], int(trace.get("baseTimeNanoseconds", 0))))
        groups = {one["pg_desc"]: tuple(one["ranks"]) for one in distributed.get("pg_config", ())}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} cannot be read as a trace of torch.profiler ({error}): name a .json or .json.gz that "
            "export_chrome_trace wrote, or the folder of a run with run.profile_start"
        ) from None
    if not events:
        raise ConfigError(f"{file}: the trace holds no events; name a trace with operators")
    return RankTrace(
        rank=int(distributed.get("rank", 0)),
        world_size=int(distributed.get("world_size", 1)),
        host=str(trace.get("host_name", "")),
        torch_version=str(trace.get("torch_version", "")),
        groups=groups,
        events=sorted(events, key=lambda event: (event.start_ns, -event.end_ns)),
    )


def _events(rows: Iterable[dict[str, Any]], base_ns: int) -> Iterable[Event]:
    for row in rows:
        if row.get("ph") == "X" and row.get("cat") in (*ON_HOST, *ON_DEVICE):
            start_ns = base_ns + round(float(row["ts"]) * 1000)
            end_ns = start_ns + round(float(row["dur"]) * 1000)
            yield Event(str(row["name"]), row["cat"], int(row["tid"]), start_ns, end_ns, row.get("args", {}))


_BACKWARD_NODE = "autograd::engine::evaluate_function"
_FSDP = "FSDP::"
_OF_MODULE = re.compile(rf"(?:{_FSDP}|{MODULE_MARK})(\w+) \((.*)\)")
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
        self._changes = sorted(_changes_of_scope(marks))

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
    """Yield (time, module that runs from then on), from the mark before it to the end of the last mark after it."""
    for mark in marks:
        if found := _OF_MODULE.fullmatch(mark.name):
            what, module = found.groups()
            if what.startswith("pre_"):
                yield mark.start_ns, module
            elif what.startswith("post_"):
                yield mark.start_ns, module
                yield mark.end_ns, ""


TEXTS = ("names", "scopes", "phases", "actions", "axes")


class Span(NamedTuple):
    """One span with its texts."""

    rank: int
    stream: int
    start_ns: int
    end_ns: int
    kind: SpanKind
    name: str
    place: StepLocation
    axis: str | None = None
    num_bytes: int = 0


def spans_from(rows: Sequence[Span], origin_ns: int) -> tuple[Spans, dict[str, Any]]:
    """Return columns of `rows` sorted by start, in seconds since `origin_ns`, and the texts that they index."""
    rows = sorted(rows, key=lambda row: row.start_ns)
    texts: dict[str, dict[str, int]] = {kind: {} for kind in TEXTS}

    def column(kind: str, values: Sequence[str | None]) -> list[int]:
        seen = texts[kind]
        return [-1 if value is None else seen.setdefault(value, len(seen)) for value in values]

    def seconds(moments_ns: Sequence[int]) -> Floats:
        return np.asarray(np.array(moments_ns, np.int64) - origin_ns, np.float64) * 1e-9

    columns = {
        "rank": [row.rank for row in rows],
        "stream": [row.stream for row in rows],
        "kind": [int(row.kind) for row in rows],
        "name": column("names", [row.name for row in rows]),
        "scope": column("scopes", [row.place.scope for row in rows]),
        "phase": column("phases", [row.place.phase for row in rows]),
        "action": column("actions", [row.place.action or None for row in rows]),
        "axis": column("axes", [row.axis for row in rows]),
        "num_bytes": [row.num_bytes for row in rows],
        "record": [-1] * len(rows),
    }
    spans = Spans(
        start_s=seconds([row.start_ns for row in rows]),
        end_s=seconds([row.end_ns for row in rows]),
        **{name: np.array(values, np.int64) for name, values in columns.items()},
    )
    return spans, {kind: tuple(seen) for kind, seen in texts.items()}
