"""Spans of one rank's step on a CPU with gloo.

The training thread acts as the default stream: it computes, hands collectives to gloo's threads, waits for them, and
runs Python. torch marks no waits of FSDP2 or of a pipeline. A wait is inferred from its end: if a collective ends
between two operators, the thread waited since the first of them. So Python code after a collective that no operator
waits for may count as a wait, at most as long as the gap.

Communication ops of gloo in a profile.
gloo's events, on its own threads, record the tensor but neither group nor axis. Those belong to the call, on the
training thread; events and calls with equally many elements come in the same order.
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshwright.profiler.chrome_trace import MARK, OPERATOR, Event, RankTrace, Span, StepLocations
from meshwright.profiler.communication_op import CommunicationOp, EventRole, axis_of, role_of, trace_name
from meshwright.spec.trace.timeline import DATA_MARK, SpanKind

_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
Interval = tuple[int, int]


def spans_of_host(trace: RankTrace, step: Event) -> tuple[list[Span], list[CommunicationOp]]:
    """Return the spans of the training thread, which fill the step, and gloo's communication ops."""
    events = trace.between(step.start_ns, step.end_ns)
    places = StepLocations(events)
    own = [event for event in events if event.thread == step.thread]
    work = list(outermost(own))
    calls = [event for event in work if role_of(event.name) is EventRole.COLLECTIVE]
    communications = gloo_communications(trace, events, calls, places)
    spans = [
        Span(trace.rank, 0, event.start_ns, event.end_ns, SpanKind.COMPUTE, trace_name(event.name), places.at(event))
        for event in work
        if role_of(event.name) is EventRole.OPERATOR
    ]
    in_calls = {one.issued_ns: one for one in communications}
    for call in calls:
        if call.start_ns in in_calls:
            spans.append(_wait(in_calls[call.start_ns], call.start_ns, call.end_ns))
    gaps = list(gaps_of([(event.start_ns, event.end_ns) for event in work], step.start_ns, step.end_ns))
    spans += _waits(gaps, communications)
    taken = sorted((span.start_ns, span.end_ns) for span in spans)
    spans += _rest(trace.rank, gaps_of(taken, step.start_ns, step.end_ns), own, places)
    return spans, communications


def outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the outermost operators and collectives of one thread."""
    covered_ns = 0
    for event in events:
        if event.category == OPERATOR and event.start_ns >= covered_ns and role_of(event.name) is not EventRole.WRAPPER:
            covered_ns = event.end_ns
            yield event


def gaps_of(covered: Iterable[Interval], from_ns: int, to_ns: int) -> Iterator[Interval]:
    """Yield the gaps between sorted intervals, from `from_ns` to `to_ns`."""
    free_ns = from_ns
    for start_ns, end_ns in covered:
        if start_ns > free_ns:
            yield free_ns, min(start_ns, to_ns)
        free_ns = max(free_ns, end_ns)
    if free_ns < to_ns:
        yield free_ns, to_ns


def _waits(gaps: Sequence[Interval], communications: Iterable[CommunicationOp]) -> Iterator[Span]:
    """Yield the waits of the thread, without overlap."""
    starts = [start_ns for start_ns, _ in gaps]
    waited_ns = 0
    for one in sorted(communications, key=lambda one: one.end_ns):
        at = bisect_right(starts, one.end_ns) - 1
        if at < 0 or one.end_ns > gaps[at][1]:
            continue  # the thread computed when it ended
        start_ns = max(gaps[at][0], one.issued_ns, waited_ns)
        if start_ns < one.end_ns:
            yield _wait(one, start_ns, one.end_ns)
        waited_ns = max(waited_ns, one.end_ns)


def _wait(one: CommunicationOp, start_ns: int, end_ns: int) -> Span:
    return Span(one.rank, 0, start_ns, end_ns, SpanKind.WAIT, one.name, one.place, one.axis)


def _rest(rank: int, gaps: Iterable[Interval], own: Sequence[Event], places: StepLocations) -> Iterator[Span]:
    """Yield the other spans of the thread: waits for data, unnamed compiled code, Python."""
    inside = [
        (event.start_ns, event.end_ns, SpanKind.DATA if event.name == DATA_MARK else SpanKind.COMPUTE)
        for event in own
        if event.name.startswith(_COMPILED) or (event.category == MARK and event.name == DATA_MARK)
    ]
    for start_ns, end_ns in gaps:
        cuts = sorted({start_ns, end_ns, *(cut for one in inside for cut in one[:2] if start_ns < cut < end_ns)})
        for first_ns, last_ns in pairwise(cuts):
            kinds = [kind for start, end, kind in inside if start <= first_ns and last_ns <= end]
            kind = kinds[-1] if kinds else SpanKind.HOST
            at = places.at(Event("", "", 0, first_ns, last_ns, {}))
            yield Span(rank, 0, first_ns, last_ns, kind, _NAMES[kind], at)


_NAMES = {SpanKind.COMPUTE: "compiled code", SpanKind.DATA: "data", SpanKind.HOST: "python"}


_GLOO = "gloo:"
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}
"""By the profiler's names of data types; 1 for any other, such as bool."""


def gloo_communications(
    trace: RankTrace, events: Sequence[Event], calls: Sequence[Event], places: StepLocations
) -> list[CommunicationOp]:
    """Return this rank's communication ops in `events`; `calls` are the calls of collectives, in order."""
    open_calls: dict[int, deque[Event]] = defaultdict(deque)
    for call in calls:
        for size in set(_sizes(call.args.get("Input Dims", ()))):
            open_calls[size].append(call)
    ends = _ends_on_threads(events, calls[0].thread if calls else None)
    paired: set[int] = set()
    found = []
    for event in events:
        if event.name.startswith(_GLOO):
            size = max(_sizes(event.args.get("Input Dims", ())), default=0)
            queue = open_calls[size]
            while queue and (id(queue[0]) in paired):
                queue.popleft()
            call = queue.popleft() if queue and queue[0].start_ns <= event.start_ns else event
            paired.add(id(call))
            found.append(_communication(trace, call, event, places, ends.get(id(event), event.end_ns)))
    return found


def _communication(trace: RankTrace, call: Event, event: Event, places: StepLocations, end_ns: int) -> CommunicationOp:
    name = trace_name(call.name)
    description = places.group_description(call.start_ns)
    axis = axis_of(name, description, places.fsdp_mark(call.start_ns), trace.groups)
    group = trace.groups.get(f"mesh_{axis}", tuple(range(trace.world_size)))
    largest = max((*_sizes(call.args.get("Input Dims", ())), *_sizes(event.args.get("Input Dims", ()))), default=0)
    (format_name,) = event.args.get("Input type", [""])[:1] or [""]
    found = CommunicationOp(
        rank=trace.rank,
        name=name,
        axis=axis,
        group=group,
        num_bytes=largest * _ITEM_BYTES.get(format_name, 1),
        place=places.at(call),
        issued_ns=call.start_ns,
        start_ns=event.start_ns,
        end_ns=end_ns,
        stream=1,
    )
    _name_ends(found, call.args, trace.rank)
    return found


def _name_ends(found: CommunicationOp, arguments: Mapping[str, Any], rank: int) -> None:
    """Set the sender and the receiver of a message."""
    what = found.name.split(".")[-1]
    if what in ("send", "recv_"):
        peer = found.group[int(arguments["Concrete Inputs"][2])]
        found.source, found.target = (rank, peer) if what == "send" else (peer, rank)


def _sizes(dims: Any) -> Iterator[int]:
    """Yield the number of elements of each tensor among an event's dims, lists of tensors included."""
    if all(isinstance(dim, int) for dim in dims):
        yield math.prod(dims)
    else:
        for inner in dims:
            yield from _sizes(inner)


def _ends_on_threads(events: Sequence[Event], trains: int | None) -> dict[int, int]:
    """Return the end of each event on gloo's threads, including the copy of its result."""
    ends: dict[int, int] = {}
    last: dict[int, int] = {}
    for event in events:
        if event.thread == trains:
            continue
        if event.name.startswith(_GLOO):
            last[event.thread] = id(event)
        if event.thread in last and (event.category == OPERATOR or event.name.startswith(_GLOO)):
            at = last[event.thread]
            ends[at] = max(ends.get(at, 0), event.end_ns)
    return ends
