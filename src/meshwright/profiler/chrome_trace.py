"""One rank's torch.profiler trace in Chrome's trace format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError
from meshwright.spec.trace.marks import STEP_MARK

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
