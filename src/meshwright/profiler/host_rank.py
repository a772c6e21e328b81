"""Spans of one rank's step on a CPU with gloo.

The training thread acts as the default stream: it computes, hands collectives to gloo's threads, waits for them, and
runs Python. torch marks no waits of FSDP2 or of a pipeline. A wait is inferred from its end: if a collective ends
between two operators, the thread waited since the first of them. So Python code after a collective that no operator
waits for may count as a wait, at most as long as the gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from meshwright.profiler.chrome_trace import MARK, OPERATOR, Event, RankTrace
from meshwright.profiler.communication_op import CommunicationOp
from meshwright.profiler.gloo import gloo_communications
from meshwright.profiler.span_table import Span
from meshwright.profiler.step_location import StepLocations
from meshwright.profiler.torch_operators import EventRole, role_of, trace_name
from meshwright.spec.trace.marks import DATA_MARK
from meshwright.spec.trace.timeline import SpanKind

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
