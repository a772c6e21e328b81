"""message_hazards(): P2P messages whose order or tags NCCL may treat differently than the program expects.

NCCL executes the unbatched sends and receives of a pair of ranks in the order in which each rank issues them. If both
send first, both block, except for messages that are buffered (some tens of MiB at most). If both receive first, they
deadlock. NCCL ignores tags: messages of a pair are matched by their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from meshwright.simulator.checks.places import place_of
from meshwright.simulator.engine.matching import Channel, match
from meshwright.spec.trace.problem import Hazard, MessageHazardKind, Place
from meshwright.spec.trace.trace import BATCHED, HOST_AXIS, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_KIND: dict[int, MessageHazardKind] = {
    RecordKind.SEND: "both send first",
    RecordKind.RECEIVE: "both receive first",
}
_Queues = dict[tuple[str, tuple[int, ...], int], list[int]]
"""Records of messages by the name and the ranks of their group, and by the rank at the other end."""


def message_hazards(traces: Traces) -> tuple[Hazard, ...]:
    """Return the messages of a step whose messages match; each pair of lines once, with how many ranks run them."""
    found: dict[tuple[MessageHazardKind, str, str], list[tuple[Place, Place]]] = defaultdict(list)
    for kind, first, second in (*_other_tags(traces), *_unordered(traces)):
        found[kind, first.line or first.scope, second.line or second.scope].append((first, second))
    return tuple(
        Hazard(
            kind=kind,
            first=pairs[0][0],
            second=pairs[0][1],
            num_ranks=len({one.rank for pair in pairs for one in pair}),
        )
        for (kind, *_), pairs in found.items()
    )


_Found = Iterator[tuple[MessageHazardKind, Place, Place]]


def _other_tags(traces: Traces) -> _Found:
    """Yield the first message of each channel that is received with another tag than it was sent with."""
    for channel in match(traces).channels:
        if not channel.is_message or HOST_AXIS in channel.axis:
            continue
        for places in _ends(traces, channel):
            sent, received = (_tag(place) for place in places)
            if sent != received:
                yield "tags differ", *places
                break


def _ends(traces: Traces, channel: Channel) -> Iterator[tuple[Place, Place]]:
    sender, receiver = (traces.traces[member] for member in channel.members)
    for sent, received in zip(*channel.rows, strict=False):
        if sender.records.signature[sent] >= 0 <= receiver.records.signature[received]:
            yield place_of(sender, int(sent), channel.axis), place_of(receiver, int(received), channel.axis)


def _tag(place: Place) -> str:
    return next((word for word in place.agreed.split(", ") if word.startswith("tag ")), "")


def _unordered(traces: Traces) -> _Found:
    """Yield where a pair of ranks, both of them traced, first send to each other or receive from each other at a time.

    A rank that was not traced does what its representative does, to other ranks.
    """
    queues = {rank: _queues(trace) for rank, trace in traces.traces.items()}
    for rank, own in queues.items():
        for (axis, group, peer), rows in own.items():
            theirs = queues.get(peer, {}).get((axis, group, rank), []) if rank < peer else []
            trace, other = traces.traces[rank], traces.traces.get(peer)
            for first, second in zip(rows, theirs, strict=False):
                kind = int(trace.records.kind[first])
                if other is not None and kind == other.records.kind[second]:
                    yield _KIND[kind], place_of(trace, first), place_of(other, second)
                    break


def _queues(trace: Trace) -> _Queues:
    """Return the messages of a rank that NCCL runs one after the other."""
    records, found = trace.records, _Queues()
    is_batched = np.array([*(BATCHED in one.agreed for one in trace.signatures), False])[records.signature]
    is_message = np.isin(records.kind, (RecordKind.SEND, RecordKind.RECEIVE)) & ~is_batched & (records.group >= 0)
    for row in np.flatnonzero(is_message).tolist():
        group, peer = int(records.group[row]), int(records.peer[row])
        axis = trace.group_names[group]
        if peer != trace.traced.rank and HOST_AXIS not in axis:
            found.setdefault((axis, trace.groups[group], peer), []).append(row)
    return found
