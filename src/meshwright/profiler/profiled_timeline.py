"""Timeline of a real step, from torch.profiler's traces of all ranks, or from the profiler window of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.profiler.chrome_trace import ON_DEVICE, OPERATOR, Event, RankTrace, read_chrome_trace
from meshwright.profiler.communication_op import CommunicationOp, align_starts
from meshwright.profiler.device_rank import spans_of_device, waits_of_device
from meshwright.profiler.host_rank import spans_of_host
from meshwright.profiler.span_table import Span, spans_from
from meshwright.spec.run.run import HOW_TO_PROFILE, Run
from meshwright.spec.trace.timeline import SpanKind, Timeline, TimelineSource

_TRACE = re.compile(r"step-(\d+)-rank-\d+\.json\.gz")


def profile_of_run(folder: Path, step: int | None = None) -> Timeline:
    """Return the last step of the window, or `step`; raises ConfigError without a profile."""
    files = profiled_files(folder)
    if not files:
        raise ConfigError(f"{folder} has no profile: {HOW_TO_PROFILE}")
    return timeline_of(files, str(folder), step)


def profiled_files(folder: Path) -> list[Path]:
    """Return the traces of the newest window of the run in `folder`, one per rank, or []."""
    found = {
        file: int(match[1]) for file in Run(folder).timelines.glob("*.gz") if (match := _TRACE.fullmatch(file.name))
    }
    return sorted(file for file, start in found.items() if start == max(found.values()))


def timeline_of(files: Sequence[Path], name: str, step: int | None = None) -> Timeline:
    """Return the last step, or `step`, that all traces in `files` contain, one file per rank.

    Raises ConfigError for invalid traces, duplicate ranks and missing steps. Traces without step marks are one step.
    """
    traces = sorted((read_chrome_trace(file) for file in files), key=lambda trace: trace.rank)
    ranks = tuple(trace.rank for trace in traces)
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"the traces are of ranks {list(ranks)}: name one file of each rank, of one window of steps")
    if len({trace.host for trace in traces}) > 1:
        logger.warning("the ranks ran on several hosts, whose clocks are assumed equal: waits may be inaccurate")
    marks = _marks(traces, step)
    begin_ns, end_ns = min(mark.start_ns for mark in marks), max(mark.end_ns for mark in marks)
    columns, texts = spans_from(_spans(traces, marks), begin_ns)
    return Timeline(
        source=TimelineSource(
            kind="measured",
            name=name,
            world_size=max(trace.world_size for trace in traces),
            versions={"torch": traces[0].torch_version} if traces[0].torch_version else {},
        ),
        step_s=(end_ns - begin_ns) * 1e-9,
        ranks=ranks,
        multiplicity=(1,) * len(ranks),
        spans=columns,
        **texts,
    )


def _spans(traces: Sequence[RankTrace], marks: Sequence[Event]) -> list[Span]:
    """Return the spans of the step on all ranks."""
    spans: list[Span] = []
    communications: list[CommunicationOp] = []
    of_devices: list[tuple[list[Span], list[CommunicationOp]]] = []
    for trace, mark in zip(traces, marks, strict=True):
        has_device = any(event.category in ON_DEVICE for event in trace.events)
        own, found = (spans_of_device if has_device else spans_of_host)(trace, mark)
        spans += own
        communications += found
        if has_device:
            of_devices.append((own, found))
    align_starts(communications)
    for own, found in of_devices:
        spans += waits_of_device(own, found)
    return [*spans, *map(_communication_span, communications)]


def _marks(traces: Sequence[RankTrace], step: int | None) -> list[Event]:
    """Return the step's mark on each rank."""
    steps = [trace.steps() for trace in traces]
    if step is None and not any(steps):
        return [_whole(trace) for trace in traces]
    common = sorted(set(steps[0]).intersection(*steps[1:]))
    chosen = step if step is not None else max(common, default=None)
    if chosen not in common:
        shared = ", ".join(map(str, common)) or "none"
        raise ConfigError(f"step {chosen}: must be in the traces of all ranks, which share: {shared}")
    return [marks[chosen] for marks in steps]


def _whole(trace: RankTrace) -> Event:
    """Return a mark around all events, on the thread with the most operators."""
    threads = [event.thread for event in trace.events if event.category == OPERATOR]
    busiest = max(set(threads), key=threads.count, default=0)
    ends = chain(event.end_ns for event in trace.events)
    return Event("", "", busiest, trace.events[0].start_ns, max(ends), {})


def _communication_span(one: CommunicationOp) -> Span:
    return Span(
        one.rank,
        one.stream,
        one.began_ns,
        one.end_ns,
        SpanKind.COMMUNICATION,
        one.name,
        one.place,
        one.axis,
        one.num_bytes,
    )
