"""A timeline as a file that ui.perfetto.dev opens: the trace-event format of Chrome, which is JSON.

Processes are ranks, threads their streams and the host, counters their memory, and arrows go from where a message was
sent to where it arrived. Source of the format: "Trace Event Format", the Chromium project's public document. Times are
in microseconds. Process 0 is what the system idles in, so that numbers here begin with 1.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from meshwright.pages.figures.intervals import Message, stream_names, thinned
from meshwright.spec.trace.timeline import MemoryCurve, SpanKind, TensorRole, Timeline
from meshwright.units import MiB

_US_PER_S, _NS_PER_S, _NS_PER_US = 1e6, 1e9, 1e3
_THREADS_PER_RANK = 1_000
_MAX_MOMENTS = 4_000
"""Values of a rank's memory that are shown, its peak among them: each is a line of the file for every rank."""


def write_perfetto(timeline: Timeline, file: Path, messages: Sequence[Message] = ()) -> None:
    """Write the timeline to `file`, packed if its name ends in .gz; `messages` become arrows."""
    with cast(IO[str], gzip.open(file, "wt", encoding="utf-8") if file.suffix == ".gz" else file.open("w")) as stream:
        stream.write('{"displayTimeUnit":"ms","otherData":')
        stream.write(json.dumps({"name": timeline.source.name, "kind": timeline.source.kind}))
        stream.write(',"traceEvents":[\n')
        separator = ""
        for event in perfetto_events(timeline, messages):
            stream.write(f"{separator}{json.dumps(event, separators=(',', ':'))}")
            separator = ",\n"
        stream.write("\n]}\n")


def perfetto_events(timeline: Timeline, messages: Sequence[Message] = ()) -> Iterator[dict[str, Any]]:
    """Yield the events of the file: names first, then spans, memory and arrows."""
    yield from _names(timeline)
    yield from _spans(timeline)
    for curve in timeline.memory:
        yield from _memory(curve)
    yield from _arrows(timeline, messages)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for place, (rank, count) in enumerate(zip(timeline.ranks, timeline.multiplicity, strict=True)):
        title = f"rank {rank}" + (f" (as {count - 1} more)" if count > 1 else "")
        yield _about("process_name", rank, 1, name=title)
        yield _about("process_sort_index", rank, 1, sort_index=place + 1)
        for stream, name in stream_names(timeline, timeline.of_rank(rank)).items():
            yield _about("thread_name", rank, stream, name=name)
            yield _about("thread_sort_index", rank, stream, sort_index=stream)


def _about(what: str, rank: int, stream: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank + 1, "tid": _thread(rank, stream), "args": values}


def _thread(rank: int, stream: int) -> int:
    """Return a number that no other rank's thread has, nor any process: else it would be taken for the main one."""
    return (rank + 1) * _THREADS_PER_RANK + stream + 1


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    spans = timeline.spans
    # Both ends are rounded, not the length: spans that follow each other must not overlap.
    start_ns, end_ns = (np.rint(at_s * _NS_PER_S).astype(np.int64) for at_s in (spans.start_s, spans.end_s))
    columns: Iterable[Any] = zip(
        *(getattr(spans, name).tolist() for name in ("rank", "stream", "kind", "name", "num_bytes")),
        *(getattr(spans, name).tolist() for name in ("scope", "phase", "action", "axis")),
        (start_ns / _NS_PER_US).tolist(),
        ((end_ns - start_ns) / _NS_PER_US).tolist(),
        strict=True,
    )
    kinds = {kind.value: kind.name.lower() for kind in SpanKind}
    texts = (timeline.scopes, timeline.phases, timeline.actions, timeline.axes)
    for rank, stream, kind, name, num_bytes, *places, start, took in columns:
        labels = zip(("scope", "phase", "action", "axis"), texts, places, strict=True)
        about: dict[str, Any] = {label: values[place] for label, values, place in labels if place >= 0}
        if num_bytes > 0:
            about["bytes"] = num_bytes
        title = timeline.names[name] if name >= 0 else kinds[kind]
        if kind == SpanKind.WAIT:
            title = f"wait: {title}"
        yield {
            "ph": "X",
            "name": title,
            "cat": kinds[kind],
            "pid": rank + 1,
            "tid": _thread(rank, stream),
            "ts": start,
            "dur": took,
            "args": about,
        }


def _memory(curve: MemoryCurve) -> Iterator[dict[str, Any]]:
    rows = thinned(curve, _MAX_MOMENTS)
    roles = [role for role in TensorRole if curve.by_role[:, role].any()]
    at_us = (curve.at_s[rows] * _US_PER_S).round(3).tolist()
    columns = {role.name.lower(): curve.by_role[rows, role] for role in roles}
    columns |= {"allocated": curve.allocated_bytes[rows], "reserved": curve.reserved_bytes[rows]}
    for name, values in columns.items():
        shown, last = (values / MiB).round(3).tolist(), None
        for at, value in zip(at_us, shown, strict=True):
            # A counter keeps its value until the next one.
            if value != last:
                yield {"ph": "C", "name": name, "pid": curve.rank + 1, "ts": at, "args": {"MiB": value}}
            last = value


def _arrows(timeline: Timeline, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    spans = timeline.spans
    for number, message in enumerate(messages, start=1):
        for phase, row in (("s", message.sent), ("f", message.received)):
            event = {"ph": phase, "id": number, "name": "message", "cat": "message"}
            event |= {"pid": int(spans.rank[row]) + 1, "tid": _thread(int(spans.rank[row]), int(spans.stream[row]))}
            # Either end lies inside of its span: at the very end the next one would be meant.
            at_s = float(spans.start_s[row] + spans.end_s[row]) / 2
            yield event | {"ts": round(at_s * _US_PER_S, 3)} | ({"bp": "e"} if phase == "f" else {})
