"""Which span received what another one sent, for arrows in a picture.

The k-th message that one rank sends to another is the k-th that this one receives from it, as the back ends define it.
Of ranks of one class one is drawn, as the receiver of messages to any of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from meshwright.spec.trace.timeline import SpanKind, Timeline
from meshwright.spec.trace.trace import RecordKind
from meshwright.spec.trace.traces import Traces


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
