"""match(): which records of different ranks are one communication op: a collective, or a message between two ranks.

Collectives of a group are matched by their order in it, messages by their order from one rank to another. Where one
rank's trace represents many, its partners were not traced, but their representatives were. Groups with the same axis,
classes of ranks and distances between them are then one group, which has each class once: 16 pipeline ranks that
represent 16,384 communicate as if there were no others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class Channel:
    """A sequence of communication ops: those of a group, or messages from one rank to another."""

    axis: str
    is_message: bool
    ranks: tuple[int, ...]
    """The group of the first representative; of messages sender and receiver."""
    group: tuple[int, ...]
    """The whole group, of messages too; empty where the operator names none."""
    members: tuple[int, ...]
    """Representatives that take part; of a message the sender's and the receiver's."""
    first: int
    """Its first communication op; the others have the numbers that follow."""
    num_comm_ops: int
    rows: tuple[Ints, ...]
    """Each member's records, in order; fewer than num_comm_ops where one of them misses some."""


@dataclass(frozen=True)
class CommOps:
    """All communication ops of a step, numbered channel by channel."""

    channels: tuple[Channel, ...]
    of_record: dict[int, Ints]
    """For each representative the communication op of each record; -1 for none [records]."""
    channel: Ints
    """[comm_ops]"""

    def __len__(self) -> int:
        return len(self.channel)


_Side = tuple[int, Ints]
"""A representative, and its records."""


@dataclass
class _Found:
    axis: str
    is_message: bool
    ranks: tuple[int, ...]
    group: tuple[int, ...]
    members: tuple[int, ...]
    sides: dict[tuple[int, int], Ints]
    """By representative and kind of record."""


def match(traces: Traces) -> CommOps:
    """Return the communication ops of a step; check() reports those that lack a rank."""
    found: dict[Hashable, _Found] = {}
    for rank, trace in sorted(traces.traces.items()):
        for key, one in (*_collectives(rank, trace, traces), *_messages(rank, trace, traces)):
            found.setdefault(key, one).sides.update(one.sides)
    of_record = {rank: np.full(len(trace.records), NONE, np.int64) for rank, trace in traces.traces.items()}
    channels: list[Channel] = []
    first = 0
    for one in found.values():
        num_comm_ops = max(len(rows) for rows in one.sides.values())
        for (rank, _), rows in one.sides.items():
            of_record[rank][rows] = first + np.arange(len(rows))
        rows_of_members = tuple(one.sides.get(side, _NO_ROWS) for side in _sides(one))
        channels.append(
            Channel(
                axis=one.axis,
                is_message=one.is_message,
                ranks=one.ranks,
                group=one.group,
                members=one.members,
                first=first,
                num_comm_ops=num_comm_ops,
                rows=rows_of_members,
            )
        )
        first += num_comm_ops
    lengths = [channel.num_comm_ops for channel in channels]
    return CommOps(tuple(channels), of_record, np.repeat(np.arange(len(channels)), lengths))


_NO_ROWS = np.zeros(0, np.int64)


def _sides(one: _Found) -> list[tuple[int, int]]:
    if not one.is_message:
        return [(rank, int(RecordKind.COLLECTIVE)) for rank in one.members]
    return [(one.members[0], int(RecordKind.SEND)), (one.members[1], int(RecordKind.RECEIVE))]


def _collectives(rank: int, trace: Trace, traces: Traces) -> Iterator[tuple[Hashable, _Found]]:
    is_collective = trace.records.kind == RecordKind.COLLECTIVE
    for group in np.unique(trace.records.group[is_collective]).tolist():
        rows = np.flatnonzero(is_collective & (trace.records.group == group))
        sides = {(rank, int(RecordKind.COLLECTIVE)): rows}
        if group == NONE:
            # An operator without a group involves no other rank.
            yield (rank, NONE), _Found("", False, (rank,), (), (rank,), sides)
            continue
        ranks = trace.groups[group]
        key = group_key(trace, group, traces.class_of_rank)
        members = np.unique(traces.class_of_rank[list(ranks)]).tolist()
        yield key, _Found(trace.group_names[group], False, ranks, ranks, tuple(members), sides)


def _messages(rank: int, trace: Trace, traces: Traces) -> Iterator[tuple[Hashable, _Found]]:
    records, class_of = trace.records, traces.class_of_rank
    rows = np.flatnonzero((records.kind == RecordKind.SEND) | (records.kind == RecordKind.RECEIVE))
    columns = np.stack([records.kind[rows], records.group[rows], records.peer[rows]], axis=1)
    unique, where = np.unique(columns, axis=0, return_inverse=True)
    for number, (kind, group, peer) in enumerate(unique.tolist()):
        sender, receiver = (rank, peer) if kind == RecordKind.SEND else (peer, rank)
        members = (int(class_of[sender]), int(class_of[receiver]))
        if group == NONE:
            axis, ranks, key, distance = "", (), None, receiver - sender
        else:
            axis, ranks = trace.group_names[group], trace.groups[group]
            key = group_key(trace, group, traces.class_of_rank)
            # Round the group: the last one's neighbour is the first.
            distance = (ranks.index(receiver) - ranks.index(sender)) % len(ranks)
        sides = {(rank, kind): rows[where.ravel() == number]}
        yield (key, members, distance), _Found(axis, True, (sender, receiver), ranks, members, sides)


def group_key(trace: Trace, group: int, class_of_rank: Ints) -> Hashable:
    """Return the key that equivalent groups share; if every rank was traced, no two groups do."""
    ranks = np.array(trace.groups[group])
    classes = class_of_rank[ranks]
    return trace.group_names[group], classes.tobytes(), (ranks - ranks[0]).tobytes()
