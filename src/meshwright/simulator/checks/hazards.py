"""hazards(): races of all ranks, grouped by the two lines of the program; message_hazards(): P2P order and tags.

NCCL executes the unbatched sends and receives of a pair of ranks in the order in which each rank issues them. If both
send first, both block, except for messages that are buffered (some tens of MiB at most). If both receive first, they
deadlock. NCCL ignores tags: messages of a pair are matched by their order.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from meshwright.simulator.background import in_background
from meshwright.simulator.checks.call_sites import call_site_of
from meshwright.simulator.checks.races import Race, races_of
from meshwright.simulator.engine.matching import Channel, match
from meshwright.spec.trace.trace import BATCHED, HOST_AXIS, NONE, RecordKind, Trace
from meshwright.spec.trace.trace_problem import CallSite, Hazard, MessageHazardKind
from meshwright.spec.trace.traces import Traces


def hazards(traces: Traces) -> tuple[Hazard, ...]:
    """Return the tensors that streams and communication use in no defined order."""
    with hazards_in_background(traces) as found:
        return found()


@contextmanager
def hazards_in_background(traces: Traces) -> Iterator[Callable[[], tuple[Hazard, ...]]]:
    """Yield a function that waits for and returns hazards(traces)."""
    ranks = sorted(traces.traces)
    of_rank = [traces.traces[rank] for rank in ranks]
    with in_background(races_of, of_rank, sum(len(trace.records) for trace in of_rank)) as races:
        yield lambda: _hazards(traces, dict(zip(ranks, races(), strict=True)))


def _hazards(traces: Traces, races: Mapping[int, Sequence[Race]]) -> tuple[Hazard, ...]:
    found: dict[Hashable, dict[int, list[Race]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in races.items():
        trace = traces.traces[rank]
        for race in own:
            places = [call_site_of(trace, row) for row in (race.first, race.second) if row != NONE]
            found[race.kind, *(_line(place) for place in places)][rank].append(race)
    return tuple(_hazard(traces, places) for places in found.values())


def _hazard(traces: Traces, by_rank: dict[int, list[Race]]) -> Hazard:
    rank, races = next(iter(by_rank.items()))
    first, trace = races[0], traces.traces[rank]
    return Hazard(
        kind=first.kind,
        first=call_site_of(trace, first.first),
        second=None if first.second == NONE else call_site_of(trace, first.second),
        count=len(races),
        num_ranks=sum(int((traces.class_of_rank == one).sum()) for one in by_rank),
    )


def _line(place: CallSite) -> Hashable:
    return place.line or (place.scope, place.op)


_KIND: dict[int, MessageHazardKind] = {
    RecordKind.SEND: "both send first",
    RecordKind.RECEIVE: "both receive first",
}
_Queues = dict[tuple[str, tuple[int, ...], int], list[int]]
"""Records of messages by the name and the ranks of their group, and by the rank at the other end."""


def message_hazards(traces: Traces) -> tuple[Hazard, ...]:
    """Return the hazards of a step whose messages match; each pair of lines once, with its number of ranks."""
    found: dict[tuple[MessageHazardKind, str, str], list[tuple[CallSite, CallSite]]] = defaultdict(list)
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


_Found = Iterator[tuple[MessageHazardKind, CallSite, CallSite]]


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


def _ends(traces: Traces, channel: Channel) -> Iterator[tuple[CallSite, CallSite]]:
    sender, receiver = (traces.traces[member] for member in channel.members)
    for sent, received in zip(*channel.rows, strict=False):
        if sender.records.signature[sent] >= 0 <= receiver.records.signature[received]:
            yield call_site_of(sender, int(sent), channel.axis), call_site_of(receiver, int(received), channel.axis)


def _tag(place: CallSite) -> str:
    return next((word for word in place.agreed.split(", ") if word.startswith("tag ")), "")


def _unordered(traces: Traces) -> _Found:
    """Yield where two traced ranks first both send to, or both receive from, each other.

    A rank that was not traced does the same as its representative, with other peers.
    """
    queues = {rank: _queues(trace) for rank, trace in traces.traces.items()}
    for rank, own in queues.items():
        for (axis, group, peer), rows in own.items():
            theirs = queues.get(peer, {}).get((axis, group, rank), []) if rank < peer else []
            trace, other = traces.traces[rank], traces.traces.get(peer)
            for first, second in zip(rows, theirs, strict=False):
                kind = int(trace.records.kind[first])
                if other is not None and kind == other.records.kind[second]:
                    yield _KIND[kind], call_site_of(trace, first), call_site_of(other, second)
                    break


def _queues(trace: Trace) -> _Queues:
    """Return the unbatched messages of a rank, which NCCL executes in order."""
    records, found = trace.records, _Queues()
    is_batched = np.array([*(BATCHED in one.agreed for one in trace.signatures), False])[records.signature]
    is_message = np.isin(records.kind, (RecordKind.SEND, RecordKind.RECEIVE)) & ~is_batched & (records.group >= 0)
    for row in np.flatnonzero(is_message).tolist():
        group, peer = int(records.group[row]), int(records.peer[row])
        axis = trace.group_names[group]
        if peer != trace.traced.rank and HOST_AXIS not in axis:
            found.setdefault((axis, trace.groups[group], peer), []).append(row)
    return found
