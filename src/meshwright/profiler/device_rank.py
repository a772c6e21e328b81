"""Spans of one rank's step on a CUDA device.

Kernels and copies are on the device's timeline; a correlation id links each to the launch on the host, which gives its
operator, phase and module. An NCCL kernel is a collective that runs from when its own rank arrives; its wait for other
ranks is inferred from their kernels.

Written from torch's sources and documentation and tested on hand-made traces only, without a real device trace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshwright.profiler.chrome_trace import MARK, ON_DEVICE, Event, RankTrace
from meshwright.profiler.communication_op import CommunicationOp, axis_of
from meshwright.profiler.host_rank import gaps_of, outermost
from meshwright.profiler.span_table import Span
from meshwright.profiler.step_location import StepLocations
from meshwright.profiler.torch_operators import trace_name
from meshwright.spec.trace.marks import DATA_MARK
from meshwright.spec.trace.timeline import SpanKind

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
