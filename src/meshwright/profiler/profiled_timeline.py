"""Timeline of a real step, from torch.profiler's traces of all ranks, or from the profiler window of a run.

Spans of one rank's step on a CUDA device.
Kernels and copies are on the device's timeline; a correlation id links each to the launch on the host, which gives its
operator, phase and module. An NCCL kernel is a collective that runs from when its own rank arrives; its wait for other
ranks is inferred from their kernels.

Written from torch's sources and documentation and tested on hand-made traces only, without a real device trace.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.profiler.chrome_trace import (
    MARK,
    ON_DEVICE,
    OPERATOR,
    Event,
    RankTrace,
    Span,
    StepLocations,
    read_chrome_trace,
    spans_from,
)
from meshwright.profiler.communication_op import CommunicationOp, align_starts, axis_of, trace_name
from meshwright.profiler.host_rank import gaps_of, outermost, spans_of_host
from meshwright.spec.run.run import Run, how_to_profile
from meshwright.spec.trace.timeline import DATA_MARK, SpanKind, Timeline, TimelineSource

_TRACE = re.compile(r"step-(\d+)-rank-\d+\.json\.gz")


def profile_of_run(folder: Path, step: int | None = None) -> Timeline:
    """Return the last step of the window, or `step`; raises ConfigError without a profile."""
    files = profiled_files(folder)
    if not files:
        raise ConfigError(f"{folder} has no profile: {how_to_profile()}")
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
    return _timeline(_traces(files), name, step)


class ProfiledSteps(NamedTuple):
    """The median step of a profiler window."""

    timeline: Timeline
    step: int
    num_steps: int
    """Steps of the window that all ranks have."""


def median_step_of(files: Sequence[Path], name: str) -> ProfiledSteps:
    """Return the step of median duration of those that all traces in `files` contain, one file per rank.

    Of an even number the shorter of both. Raises ConfigError as `timeline_of` does, and for traces without step marks.
    """
    traces = _traces(files)
    marks = [trace.steps() for trace in traces]
    common = sorted(set(marks[0]).intersection(*marks[1:]))
    if not common:
        raise ConfigError(f"{name}: its traces have no step that all ranks profiled: profile a run of meshwright")
    took_ns = {
        step: max(of_rank[step].end_ns for of_rank in marks) - min(of_rank[step].start_ns for of_rank in marks)
        for step in common
    }
    median = sorted(common, key=lambda step: took_ns[step])[(len(common) - 1) // 2]
    return ProfiledSteps(_timeline(traces, name, median), median, len(common))


def _traces(files: Sequence[Path]) -> list[RankTrace]:
    """Return the traces by rank; raises ConfigError for duplicate ranks."""
    traces = sorted((read_chrome_trace(file) for file in files), key=lambda trace: trace.rank)
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"the traces are of ranks {ranks}: name one file of each rank, of one window of steps")
    if len({trace.host for trace in traces}) > 1:
        logger.warning("the ranks ran on several hosts, whose clocks are assumed equal: waits may be inaccurate")
    return traces


def _timeline(traces: Sequence[RankTrace], name: str, step: int | None) -> Timeline:
    """Return the last step, or `step`, of the traces."""
    ranks = tuple(trace.rank for trace in traces)
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


_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
"""By torch's names of NCCL data types; 1 for any other."""


def spans_of_device(trace: RankTrace, step: Event) -> tuple[list[Span], list[CommunicationOp]]:
    """Return the spans of kernels launched within the step, and NCCL's communication ops."""
    events = trace.between(step.start_ns, step.end_ns)
    places, operators = StepLocations(events), _Operators(events)
    launches = {event.args.get("correlation"): event for event in events if event.category in _LAUNCHES}
    launched = [
        (event, launches[event.args["correlation"]])
        for event in trace.events
        if event.category in ON_DEVICE and event.args.get("correlation") in launches
    ]
    stream_of = _streams([kernel for kernel, _ in launched])
    spans, communications = [], []
    for kernel, launch in launched:
        operator = operators.around(launch)
        stream = stream_of[_stream(kernel)]
        if _is_nccl(kernel):
            communications.append(_communication(trace, kernel, operator, places, stream))
        else:
            place = places.at(operator)
            name = trace_name(operator.name if operator is not launch else kernel.name)
            spans.append(Span(trace.rank, stream, kernel.start_ns, kernel.end_ns, SpanKind.COMPUTE, name, place))
    spans += [
        Span(trace.rank, -1, mark.start_ns, mark.end_ns, SpanKind.DATA, DATA_MARK, places.at(mark))
        for mark in events
        if mark.category == MARK and mark.name == DATA_MARK
    ]
    return spans, communications


def waits_of_device(spans: Iterable[Span], communications: Iterable[CommunicationOp]) -> list[Span]:
    """Return spans in which a rank's default stream is idle and a collective waits for other ranks."""
    busy = sorted((span.start_ns, span.end_ns) for span in spans if span.stream == 0)
    waits = []
    for one in communications:
        near = busy[max(bisect_right(busy, (one.start_ns,)) - 1, 0) : bisect_right(busy, (one.began_ns,))]
        for start_ns, end_ns in gaps_of(near, one.start_ns, one.began_ns):
            waits.append(Span(one.rank, 0, start_ns, end_ns, SpanKind.WAIT, one.name, one.place, one.axis))
    return waits


class _Operators:
    """Outermost operators of each host thread."""

    def __init__(self, events: Sequence[Event]) -> None:
        threads: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            threads[event.thread].append(event)
        self._of_thread = {thread: list(outermost(own)) for thread, own in threads.items()}

    def around(self, launch: Event) -> Event:
        """Return the operator that encloses a launch, or the launch itself."""
        own = self._of_thread[launch.thread]
        before = bisect_right(own, launch.start_ns, key=lambda event: event.start_ns)
        return own[before - 1] if before and launch.start_ns < own[before - 1].end_ns else launch


def _stream(kernel: Event) -> int:
    return int(kernel.args.get("stream", kernel.thread))


def _is_nccl(kernel: Event) -> bool:
    return kernel.name.startswith("nccl")


def _streams(kernels: Iterable[Event]) -> dict[int, int]:
    """Return an index for each stream: 0 for the one that computes most."""
    busy_ns: dict[int, int] = defaultdict(int)
    for kernel in kernels:
        busy_ns[_stream(kernel)] += 0 if _is_nccl(kernel) else kernel.end_ns - kernel.start_ns
    ordered = sorted(busy_ns, key=lambda stream: (stream != max(busy_ns, key=lambda one: busy_ns[one]), stream))
    return {stream: number for number, stream in enumerate(ordered)}


def _communication(trace: RankTrace, kernel: Event, call: Event, places: StepLocations, stream: int) -> CommunicationOp:
    args = kernel.args
    name = trace_name(call.name) if "::" in call.name else str(args.get("Collective name", kernel.name))
    description = str(args.get("Process Group Description", ""))
    if not description.startswith("mesh_"):
        description = places.group_description(call.start_ns) or ""
    axis = axis_of(name, description or None, places.fsdp_mark(call.start_ns), trace.groups)
    ranks = tuple(map(int, re.findall(r"\d+", str(args.get("Process Group Ranks", "")))))
    largest = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    return CommunicationOp(
        rank=trace.rank,
        name=name,
        axis=axis,
        group=ranks or tuple(range(trace.world_size)),
        num_bytes=largest * _ITEM_BYTES.get(str(args.get("dtype", "")), 1),
        place=places.at(call),
        issued_ns=call.start_ns,
        start_ns=kernel.start_ns,
        end_ns=kernel.end_ns,
        stream=stream,
        source=int(args["Src Rank"]) if "Src Rank" in args else trace.rank if "Dst Rank" in args else -1,
        target=int(args["Dst Rank"]) if "Dst Rank" in args else trace.rank if "Src Rank" in args else -1,
    )
