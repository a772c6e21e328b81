"""Exposed communication of a simulated step.

    hidden = the part of a span during which its own rank computes, on any stream; exposed = the rest

Ignored: that two collectives of one rank may be exposed at once; `decompose` counts that moment once.
"""

from weakref import WeakKeyDictionary

import numpy as np

from meshwright.simulator.checks.call_sites import without_numbers
from meshwright.spec.step.simulation_report import CollectiveUse, ExposedAt
from meshwright.spec.trace.timeline import Floats, Ints, SpanKind, Spans, Timeline
from meshwright.spec.trace.trace import RecordKind
from meshwright.spec.trace.traces import Traces

_MESSAGE_RANKS = 2


def collective_uses(timeline: Timeline, traces: Traces) -> tuple[CollectiveUse, ...]:
    """Return the cost of each kind of communication per participating rank, most exposed first."""
    spans, hidden_s = _communication(timeline)
    size = _group_sizes(spans, traces)
    example, kind = _kinds(spans.axis, spans.name, size)
    weight = _weights(timeline, spans)
    # Every rank counts once for each of its kinds.
    first, _ = _kinds(kind, spans.rank)
    num_ranks = np.bincount(kind[first], weight[first])
    total_s = spans.end_s - spans.start_s
    sums = [np.bincount(kind, weight * of) / num_ranks for of in (1, spans.num_bytes, total_s, total_s - hidden_s)]
    uses = [
        CollectiveUse(
            axis=timeline.axes[axis] if axis >= 0 else "",
            op=timeline.names[name],
            num_ranks=ranks,
            count=count,
            num_bytes=num_bytes,
            total_s=took_s,
            exposed_s=max(exposed_s, 0.0),
        )
        for (axis, name, ranks), count, num_bytes, took_s, exposed_s in zip(
            zip(*(column[example].tolist() for column in (spans.axis, spans.name, size)), strict=True),
            *(of.tolist() for of in sums),
            strict=True,
        )
    ]
    return tuple(sorted(uses, key=lambda use: -use.exposed_s))


def exposed_places(timeline: Timeline) -> tuple[ExposedAt, ...]:
    """Return where communication is exposed, most first; equal blocks are one place."""
    spans, hidden_s = _communication(timeline)
    names = [without_numbers(scope) for scope in (*timeline.scopes, "")]
    scope = np.unique(names, return_inverse=True)[1].ravel()[spans.scope]
    example, kind = _kinds(spans.axis, spans.name, spans.phase, scope)
    share = _weights(timeline, spans) / sum(timeline.multiplicity)
    total_s = spans.end_s - spans.start_s
    sums = [np.bincount(kind, share * of) for of in (1, total_s - hidden_s, hidden_s)]
    places = []
    for number, (row, *values) in enumerate(zip(example.tolist(), *(of.tolist() for of in sums), strict=True)):
        count, exposed_s, hidden = values
        is_one = len(np.unique(spans.scope[kind == number])) == 1
        place = (timeline.scopes if is_one else names)[spans.scope[row]] if spans.scope[row] >= 0 else ""
        places.append(
            ExposedAt(
                axis=text_at(timeline.axes, spans.axis[row]),
                op=timeline.names[spans.name[row]],
                phase=text_at(timeline.phases, spans.phase[row]),
                scope=place,
                count=count,
                exposed_s=max(exposed_s, 0.0),
                hidden_s=hidden,
            )
        )
    return tuple(sorted(places, key=lambda one: -one.exposed_s))


def _kinds(*columns: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination of values, in the values' order, and the kind of each row."""
    # One number a row: much faster to sort than rows.
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        key = key * len(values) + place
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return first, kind


def _communication(timeline: Timeline) -> tuple[Spans, Floats]:
    """Return the communication spans, and the seconds of each during which its rank computes."""
    if timeline not in _found:
        # Both tables of one timeline need it.
        _found[timeline] = _hidden(timeline)
    return _found[timeline]


_found: WeakKeyDictionary[Timeline, tuple[Spans, Floats]] = WeakKeyDictionary()


def _hidden(timeline: Timeline) -> tuple[Spans, Floats]:
    rows = np.flatnonzero(timeline.spans.kind == SpanKind.COMMUNICATION)
    spans, hidden_s = timeline.spans.take(rows), np.zeros(len(rows))
    for rank in timeline.ranks:
        own = timeline.of_rank(rank)
        edges_s, busy_s = busy_seconds(own.take(own.kind == SpanKind.COMPUTE))
        of_rank = spans.rank == rank
        start_s, end_s = (np.interp(at_s[of_rank], edges_s, busy_s) for at_s in (spans.start_s, spans.end_s))
        hidden_s[of_rank] = end_s - start_s
    return spans, hidden_s


def busy_seconds(computed: Spans) -> tuple[Floats, Floats]:
    """Return times, and the seconds up to each during which at least one span ran."""
    if not len(computed):
        return np.zeros(1), np.zeros(1)
    edges_s = np.unique(np.concatenate([computed.start_s, computed.end_s]))
    change = np.bincount(np.searchsorted(edges_s, computed.start_s), minlength=len(edges_s))
    change -= np.bincount(np.searchsorted(edges_s, computed.end_s), minlength=len(edges_s))
    return edges_s, np.concatenate([[0.0], np.cumsum(np.diff(edges_s) * (np.cumsum(change)[:-1] > 0))])


def _weights(timeline: Timeline, spans: Spans) -> Floats:
    """Return how many ranks each span's rank represents [spans]."""
    return np.array(timeline.multiplicity, float)[np.searchsorted(timeline.ranks, spans.rank)]


def _group_sizes(spans: Spans, traces: Traces) -> Ints:
    """Return the ranks of each span's group, two for a message, one for a copy from or to the host [spans]."""
    sizes = np.ones(len(spans), np.int64)
    for rank in np.unique(spans.rank).tolist():
        trace, rows = traces.of_rank(rank), np.flatnonzero(spans.rank == rank)
        records = spans.record[rows]
        of_group = np.array([*(len(group) for group in trace.groups), 1])[trace.records.group[records]]
        kind = trace.records.kind[records]
        sizes[rows] = np.where(
            kind == RecordKind.COLLECTIVE, of_group, np.where(kind == RecordKind.OP, 1, _MESSAGE_RANKS)
        )
    return sizes


def text_at(texts: tuple[str, ...], position: int) -> str:
    """Return a string of a table; "" for -1."""
    return texts[position] if position >= 0 else ""
