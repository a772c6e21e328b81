"""Spans of a timeline put together to what can be drawn: actions, what each stream is busy with, arrows of messages.

A step of one rank has tens of thousands of spans, of which a screen shows a thousand. What follows each other on a
stream and has one colour becomes one interval; while those are too many the shortest are left out, and it is said how
short they are.

Which span received what another one sent, for arrows in a picture.
The k-th message that one rank sends to another is the k-th that this one receives from it, as the back ends define it.
Of ranks of one class one is drawn, as the receiver of messages to any of them.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.model.op import op_kind
from meshwright.spec.trace.timeline import NO_AXIS, Ints, MemoryCurve, SpanKind, Spans, Timeline
from meshwright.spec.trace.trace import RecordKind
from meshwright.spec.trace.traces import Traces

HOST, DEFAULT = -1, 0
"""Numbers of the host and of the stream that computes where nothing else is said."""


def stream_names(timeline: Timeline, spans: Spans) -> dict[int, str]:
    """Return the name of each stream of one rank's `spans`, in the order to draw them: by axis what communicates."""
    names = {}
    for stream in np.unique(spans.stream).tolist():
        own = spans.stream == stream
        if stream in (HOST, DEFAULT):
            names[stream] = "host" if stream == HOST else "compute"
        elif (spans.kind[own] == SpanKind.COMMUNICATION).all():
            axis = int(spans.axis[own][0])
            names[stream] = (timeline.axes[axis] if axis >= 0 else "") or NO_AXIS
        else:
            names[stream] = f"stream {stream}"
    return names


_LEAVES_OUT = 0.2
"""Of intervals that are too many, at once."""
_LEAST_GAP = 1 / 3000
"""Of the step: what is no wider on a screen is no gap."""


class Interval(NamedTuple):
    """Something that can be drawn."""

    row: str
    """The rank, or the stream."""
    start_s: float
    end_s: float
    key: str
    """What it is coloured by."""
    text: str
    """What it is, in words."""


class Drawn(NamedTuple):
    """The intervals that are shown."""

    intervals: list[Interval]
    cut_s: float
    """Runs no longer than this are left out, or are part of what they interrupt."""


def action_intervals(timeline: Timeline, rank: int, most: int) -> Drawn:
    """Return the pipeline's actions on one rank, and by phase what is in none of them; at most `most`."""
    spans = timeline.of_rank(rank)
    spans = spans.take((spans.kind == SpanKind.COMPUTE) & (spans.stream >= 0))
    # An action is one thing whatever its phases are; a phase counts only outside of actions.
    names = (*timeline.actions, *timeline.phases)
    code = np.where(spans.action >= 0, spans.action, len(timeline.actions) + np.maximum(spans.phase, 0))
    gap_s = np.where(spans.action[1:] >= 0, np.inf, _LEAST_GAP * timeline.step_s)
    return _coarse(_merged(spans, code, gap_s, f"rank {rank}", lambda row: (names[code[row]],) * 2), most)


def stream_intervals(timeline: Timeline, rank: int, most: int) -> Drawn:
    """Return what each stream of one rank, and its host, is busy with or waits for; at most `most`."""
    spans, found = timeline.of_rank(rank), []
    for stream, row in stream_names(timeline, spans).items():
        own = spans.take(spans.stream == stream)
        if stream not in (HOST, DEFAULT) and (own.kind == SpanKind.WAIT).all():
            continue  # A side stream that only orders others, as some of FSDP2's do, is a row of waits.
        own = own.take(np.argsort(own.start_s, kind="stable"))
        keys = _keys(timeline, own)
        code = np.unique(np.array(keys), return_inverse=True)[1]
        gap_s = np.full(len(own) - 1, _LEAST_GAP * timeline.step_s)
        found += _merged(own, code, gap_s, row, _namer(timeline, own, keys))
    return _coarse(found, most)


def _merged(
    spans: Spans, code: Ints, gap_s: NDArray[np.float64], row: str, words: Callable[[int], tuple[str, str]]
) -> list[Interval]:
    """Return runs of spans that have one code and no more than `gap_s` between them; `words` give key and text."""
    if not len(spans):
        return []
    is_cut = (code[1:] != code[:-1]) | (spans.start_s[1:] - spans.end_s[:-1] > gap_s)
    first = np.concatenate([[0], np.flatnonzero(is_cut) + 1])
    last = np.concatenate([first[1:], [len(spans)]]) - 1
    found = []
    for start, stop in zip(first.tolist(), last.tolist(), strict=True):
        key, text = words(start)
        more = f" and {stop - start} more" if stop > start and text != key else ""
        found.append(Interval(row, float(spans.start_s[start]), float(spans.end_s[stop]), key, text + more))
    return found


def _keys(timeline: Timeline, spans: Spans) -> list[str]:
    """Return what each span is coloured by: the kind of an operation or its phase, an axis, waiting, the host."""
    kinds = [op_kind(name) for name in timeline.names]
    by_kind = {SpanKind.WAIT: "waiting", SpanKind.HOST: "host", SpanKind.DATA: "data"}
    keys = []
    for kind, name, phase, axis in zip(
        *(getattr(spans, column).tolist() for column in ("kind", "name", "phase", "axis")), strict=True
    ):
        if kind == SpanKind.COMMUNICATION:
            keys.append((timeline.axes[axis] if axis >= 0 else "") or NO_AXIS)
        elif kind == SpanKind.COMPUTE:
            is_forward = phase < 0 or timeline.phases[phase] in ("forward", "backward")
            keys.append((kinds[name] if name >= 0 else "other") if is_forward else timeline.phases[phase])
        else:
            keys.append(by_kind[SpanKind(kind)])
    return keys


def _namer(timeline: Timeline, spans: Spans, keys: list[str]) -> Callable[[int], tuple[str, str]]:
    return lambda row: (keys[row], _words(timeline, spans, row))


def _words(timeline: Timeline, spans: Spans, row: int) -> str:
    columns = (("names", spans.name), ("scopes", spans.scope), ("phases", spans.phase), ("actions", spans.action))
    texts = [getattr(timeline, name)[column[row]] for name, column in columns if column[row] >= 0]
    return ", ".join(text for text in texts if text)


def _coarse(intervals: list[Interval], most: int) -> Drawn:
    """Return at most `most` intervals: the shortest are left out, and what was only apart by them becomes one."""
    cut_s = 0.0
    while len(intervals) > most:
        took_s = np.array([one.end_s - one.start_s for one in intervals])
        cut_s = max(2 * cut_s, float(np.quantile(took_s, _LEAVES_OUT)))
        kept = [one for one, long_s in zip(intervals, took_s.tolist(), strict=True) if long_s > cut_s]
        intervals = _joined(kept, cut_s)
    return Drawn(intervals, cut_s)


def _joined(intervals: list[Interval], gap_s: float) -> list[Interval]:
    """Return the intervals, those of one row and colour that have no more than `gap_s` between them as one."""
    found: list[Interval] = []
    for one in intervals:
        last = found[-1] if found else None
        if last and (last.row, last.key) == (one.row, one.key) and one.start_s - last.end_s <= gap_s:
            found[-1] = last._replace(end_s=one.end_s)
        else:
            found.append(one)
    return found


def thinned(curve: MemoryCurve, most: int) -> Ints:
    """Return the positions of at most `most` moments of a curve: of each stretch its highest and its lowest."""
    if len(curve.at_s) <= most:
        return np.arange(len(curve.at_s))
    values = curve.allocated_bytes
    stops = np.linspace(0, len(values), most // 2 + 1).astype(np.int64)
    kept = [
        (start + int(values[start:stop].argmax()), start + int(values[start:stop].argmin()))
        for start, stop in pairwise(stops.tolist())
    ]
    return np.unique(kept)


class Message(NamedTuple):
    """Positions in Timeline.spans of both ends of a message."""

    sent: int
    received: int


def messages_of(timeline: Timeline, traces: Traces) -> list[Message]:
    """Return the messages between the ranks of `timeline`, the simulation of `traces`."""
    sent, received = (_ends(timeline, traces, kind) for kind in (RecordKind.SEND, RecordKind.RECEIVE))
    # Where one of them was cut off by a fault, the rest have no other end.
    pairs = [pair for way in sent for pair in zip(sent[way], received.get(way, []), strict=False)]
    return [Message(*pair) for pair in sorted(pairs)]


def _ends(timeline: Timeline, traces: Traces, kind: RecordKind) -> dict[tuple[int, int], list[int]]:
    """Return the spans of messages in order, by (sender, receiver), each the representative of its class."""
    spans, found = timeline.spans, defaultdict(list)
    is_message = (spans.kind == SpanKind.COMMUNICATION) & (spans.record >= 0)
    for rank in timeline.ranks:
        records = traces.of_rank(rank).records
        rows = np.flatnonzero(is_message & (spans.rank == rank))
        rows = rows[records.kind[spans.record[rows]] == kind]
        rows = rows[np.argsort(spans.record[rows], kind="stable")]
        for row, peer in zip(rows.tolist(), records.peer[spans.record[rows]].tolist(), strict=True):
            other = int(traces.class_of_rank[peer])
            found[(rank, other) if kind == RecordKind.SEND else (other, rank)].append(row)
    return dict(found)
