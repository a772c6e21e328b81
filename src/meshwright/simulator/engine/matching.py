"""match(): which records of different ranks are one communication op: a collective, or a message between two ranks.

Collectives of a group are matched by their order in it, messages by their order from one rank to another. Where one
rank's trace represents many, its partners were not traced, but their representatives were. Groups with the same axis,
classes of ranks and distances between them are then one group, which has each class once: 16 pipeline ranks that
represent 16,384 communicate as if there were no others.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

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
    first: int = 0
    """Its first communication op; the others have the numbers that follow."""
    num_comm_ops: int = 0
    rows: tuple[Ints, ...] = ()
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

    def channel_of(self, comm_op: int) -> Channel:
        """Return the channel of a communication op."""
        return self.channels[int(self.channel[comm_op])]


_MESSAGE = (RecordKind.SEND, RecordKind.RECEIVE)
_Sides = dict[tuple[int, int], Ints]
"""Records by representative and kind."""
_NO_ROWS = np.zeros(0, np.int64)


def match(traces: Traces) -> CommOps:
    """Return the communication ops of a step; check() reports those that lack a rank."""
    found: dict[Hashable, tuple[Channel, _Sides]] = {}
    for rank, trace in sorted(traces.traces.items()):
        for key, channel, own in (*_collectives(rank, trace, traces), *_messages(rank, trace, traces)):
            found.setdefault(key, (channel, {}))[1].update(own)
    of_record = {rank: np.full(len(trace.records), NONE, np.int64) for rank, trace in traces.traces.items()}
    channels: list[Channel] = []
    first = 0
    for channel, sides in found.values():
        num_comm_ops = max(len(rows) for rows in sides.values())
        for (rank, _), rows in sides.items():
            of_record[rank][rows] = first + np.arange(len(rows))
        kinds = _MESSAGE if channel.is_message else (RecordKind.COLLECTIVE,) * len(channel.members)
        rows_of_members = (sides.get(side, _NO_ROWS) for side in zip(channel.members, kinds, strict=True))
        channels.append(replace(channel, first=first, num_comm_ops=num_comm_ops, rows=tuple(rows_of_members)))
        first += num_comm_ops
    lengths = [channel.num_comm_ops for channel in channels]
    return CommOps(tuple(channels), of_record, np.repeat(np.arange(len(channels)), lengths))


def _collectives(rank: int, trace: Trace, traces: Traces) -> Iterator[tuple[Hashable, Channel, _Sides]]:
    is_collective = trace.records.kind == RecordKind.COLLECTIVE
    for group in np.unique(trace.records.group[is_collective]).tolist():
        rows = np.flatnonzero(is_collective & (trace.records.group == group))
        sides = {(rank, int(RecordKind.COLLECTIVE)): rows}
        if group == NONE:
            # An operator without a group involves no other rank.
            yield (rank, NONE), Channel("", False, (rank,), (), (rank,)), sides
            continue
        ranks = trace.groups[group]
        key = group_key(trace, group, traces.class_of_rank)
        members = np.unique(traces.class_of_rank[list(ranks)]).tolist()
        yield key, Channel(trace.group_names[group], False, ranks, ranks, tuple(members)), sides


def _messages(rank: int, trace: Trace, traces: Traces) -> Iterator[tuple[Hashable, Channel, _Sides]]:
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
        yield (key, members, distance), Channel(axis, True, (sender, receiver), ranks, members), sides


def group_key(trace: Trace, group: int, class_of_rank: Ints) -> Hashable:
    """Return the key that equivalent groups share; if every rank was traced, no two groups do."""
    ranks = np.array(trace.groups[group])
    classes = class_of_rank[ranks]
    return trace.group_names[group], classes.tobytes(), (ranks - ranks[0]).tobytes()
