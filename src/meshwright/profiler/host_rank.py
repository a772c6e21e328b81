"""spans_of_host: one rank's step where the host itself computes, as on gloo.

The thread that trains is the device's default stream: it computes, hands collectives over to gloo's threads, waits for
them, and runs Python in between. torch marks no wait of FSDP2 or of a pipeline. A wait is told by its end: gloo is done
between two operators of the thread, so the thread waited from the first of them on. What runs in Python after a
collective that nobody waits for may so count as a wait, and is as short as the gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from meshwright.profiler.chrome_trace import MARK, OPERATOR, Event, RankTrace
from meshwright.profiler.communication import Communication
from meshwright.profiler.gloo import gloo_communications
from meshwright.profiler.places import Places
from meshwright.profiler.span_table import Span
from meshwright.profiler.torch_operators import Role, role_of, trace_name
from meshwright.spec.trace.marks import DATA_MARK
from meshwright.spec.trace.timeline import SpanKind

_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
Stretch = tuple[int, int]


def spans_of_host(trace: RankTrace, step: Event) -> tuple[list[Span], list[Communication]]:
    """Return the spans of the thread that trains, which fill the step, and the communications of gloo's threads."""
    events = trace.within(step.start_ns, step.end_ns)
    places = Places(events)
    own = [event for event in events if event.thread == step.thread]
    work = list(outermost(own))
    calls = [event for event in work if role_of(event.name) is Role.COLLECTIVE]
    communications = gloo_communications(trace, events, calls, places)
    spans = [
        Span(trace.rank, 0, event.start_ns, event.end_ns, SpanKind.COMPUTE, trace_name(event.name), places.at(event))
        for event in work
        if role_of(event.name) is Role.OPERATOR
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
    """Yield the operators and collectives of one thread that are within no other."""
    covered_ns = 0
    for event in events:
        if event.category == OPERATOR and event.start_ns >= covered_ns and role_of(event.name) is not Role.PASSAGE:
            covered_ns = event.end_ns
            yield event


def gaps_of(covered: Iterable[Stretch], from_ns: int, to_ns: int) -> Iterator[Stretch]:
    """Yield what stretches in order leave free of the time between two moments."""
    free_ns = from_ns
    for start_ns, end_ns in covered:
        if start_ns > free_ns:
            yield free_ns, min(start_ns, to_ns)
        free_ns = max(free_ns, end_ns)
    if free_ns < to_ns:
        yield free_ns, to_ns


def _waits(gaps: Sequence[Stretch], communications: Iterable[Communication]) -> Iterator[Span]:
    """Yield the waits of the thread, none of which overlap."""
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


def _wait(one: Communication, start_ns: int, end_ns: int) -> Span:
    return Span(one.rank, 0, start_ns, end_ns, SpanKind.WAIT, one.name, one.place, one.axis)


def _rest(rank: int, gaps: Iterable[Stretch], own: Sequence[Event], places: Places) -> Iterator[Span]:
    """Yield what the thread does besides: waits for samples, runs compiled code without a name, runs Python."""
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
