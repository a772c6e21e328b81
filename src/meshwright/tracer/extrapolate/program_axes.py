"""Axes of a program's ranks, inferred from its groups and messages, and roles of ranks along them.

group      ranks a constant stride apart: an axis of that stride
messages   in a group of up to 32 ranks, its axis; in a longer one, such as that of all ranks, the axes of the
distances between peers: a known axis with that stride, else the length of the chain of messages from
rank 0 on; beyond 32 ranks, the rest of the group
roles      two ranks with equal traces block differently if a peer differs, so roles are refined until all ranks of
a role send to ranks of equal roles; untraced ranks send as far along their groups as the first of their
role
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.checks.disagreements import call_signatures, first_disagreement
from meshwright.simulator.engine.matching import match
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

LONG = 32
"""Length up to which a chain of messages is followed from rank to rank."""
_AT_ONCE = 8
"""Ranks of a chain of messages that are traced first."""


class Axis(NamedTuple):
    """Ranks that communicate with each other: `size` of them, `stride` apart."""

    stride: int
    size: int

    def place(self, ranks: Ints) -> Ints:
        """Return the position of each rank along the axis."""
        return ranks // self.stride % self.size


def axis_of(ranks: tuple[int, ...]) -> Axis | None:
    """Return the axis of a group; None if its ranks are not a constant stride apart."""
    strides = np.unique(np.diff(ranks))
    if len(strides) != 1 or strides[0] <= 0:
        return None
    axis = Axis(int(strides[0]), len(ranks))
    return axis if axis.place(np.array(ranks[:1]))[0] == 0 else None


def axes_of_groups(traces: Mapping[int, Trace]) -> set[Axis]:
    """Return the axes of all groups that the ranks are in, and that they communicate in."""
    groups = {ranks for trace in traces.values() for ranks in (*trace.groups, *trace.own_groups)}
    return {axis for ranks in groups if (axis := axis_of(ranks)) is not None}


def axes_of_messages(traces: Mapping[int, Trace]) -> set[Axis]:
    """Return the axes along which messages go."""
    found, distances = _directions(traces)
    world_size = next((trace.traced.world_size for trace in traces.values()), 1)
    known = {axis.stride: axis for axis in sorted(axes_of_groups(traces), reverse=True) if axis.size <= LONG}
    peers = _peers(traces)
    for whole, distance in distances:
        if distance in known:
            found.add(known[distance])
            continue
        size = _chain(distance, peers)
        axis = Axis(distance, whole.stride * whole.size // distance if size > LONG else size)
        # The wrap-around of a ring is no axis of its own.
        if size > 1 and world_size % (axis.stride * axis.size) == 0:
            found.add(axis)
        elif distance == whole.stride:
            found.add(whole)
    return found


def unknown_places(traces: Mapping[int, Trace]) -> set[int]:
    """Return the ranks to trace before the length of each chain of messages is known."""
    peers, known = _peers(traces), {axis.stride for axis in axes_of_groups(traces) if axis.size <= LONG}
    world_size = next((trace.traced.world_size for trace in traces.values()), 1)
    wanted = set()
    for _, distance in _directions(traces)[1]:
        size = _chain(distance, peers)
        if distance not in known and size <= LONG and (size - 1) * distance not in peers:
            wanted |= {place * distance for place in range(_AT_ONCE if size <= _AT_ONCE else LONG)}
    return {rank for rank in wanted - set(traces) if rank < world_size}


def ways_of_messages(trace: Trace) -> list[tuple[int, int]]:
    """Return for each message, in order, its group's size and the cyclic distance to the peer."""
    rank, found = trace.traced.rank, []
    for part in calls_of(trace):
        for row in np.flatnonzero(_is_message(part)).tolist():
            ranks = _ranks_of(part, int(part.records.group[row]))
            found.append((len(ranks), (ranks.index(int(part.records.peer[row])) - ranks.index(rank)) % len(ranks)))
    return found


def is_ring(traces: Mapping[int, Trace]) -> bool:
    """Return whether all traced ranks with messages in groups of more than 32 have the same cyclic distances."""
    ways = {tuple(sorted(way for way in ways_of_messages(trace) if way[0] > LONG)) for trace in traces.values()}
    return len(ways - {()}) == 1


def _directions(traces: Mapping[int, Trace]) -> tuple[set[Axis], set[tuple[Axis, int]]]:
    """Return the axes of short groups with messages, and the (axis, distance) pairs of long ones."""
    found, distances = set(), set()
    for rank, ranks, peers in ((rank, *one) for rank, trace in traces.items() for one in peers_by_group(trace)):
        axis = axis_of(ranks)
        if axis is not None and axis.size <= LONG:
            found.add(axis)
        elif axis is not None:
            distances |= {(axis, abs(peer - rank)) for peer in peers}
    return found, distances


def calls_of(trace: Trace) -> Sequence[Trace]:
    """Return the trace of the call, and of earlier calls if they were kept."""
    return (trace,) if trace.earlier is None else (trace, trace.earlier)


def peers_by_group(trace: Trace) -> Iterator[tuple[tuple[int, ...], set[int]]]:
    """Yield the groups in which a rank sends and receives, in any call, with its peers there."""
    found: dict[tuple[int, ...], set[int]] = {}
    for part in calls_of(trace):
        records, is_message = part.records, _is_message(part)
        for group in np.unique(records.group[is_message]).tolist():
            peers = records.peer[is_message & (records.group == group)].tolist()
            found.setdefault(_ranks_of(part, group), set()).update(peers)
    yield from found.items()


def _is_message(trace: Trace) -> NDArray[np.bool_]:
    records = trace.records
    is_message = np.isin(records.kind, (RecordKind.SEND, RecordKind.RECEIVE)) & (records.peer != NONE)
    return np.asarray(is_message)


def _ranks_of(trace: Trace, group: int) -> tuple[int, ...]:
    """Return the ranks of a message's group; all ranks if it has none."""
    return trace.groups[group] if group != NONE else tuple(range(trace.traced.world_size))


def _peers(traces: Mapping[int, Trace]) -> Mapping[int, set[int]]:
    """Return the peers of each traced rank."""
    return {rank: {peer for _, peers in peers_by_group(trace) for peer in peers} for rank, trace in traces.items()}


def _chain(distance: int, peers: Mapping[int, set[int]]) -> int:
    """Return the length of the chain of messages from rank 0 over `distance`, among traced ranks."""
    size = 1
    while size <= LONG and size * distance in peers.get((size - 1) * distance, ()):
        size += 1
    return size


def by_partners(roles: Ints, traces: Mapping[int, Trace]) -> Ints:
    """Return for each rank the first of its refined role, given the first of its role [world_size]."""
    alike = [
        (np.flatnonzero(roles == first), _role_peers(traces[first]))
        for first in np.unique(roles).tolist()
        if first in traces
    ]
    while True:
        refined = roles.copy()
        for ranks, peers in alike:
            seen = np.stack([roles[ranks], *(roles[of_all[ranks]] for of_all in peers)])
            _, at, where = np.unique(seen, axis=1, return_index=True, return_inverse=True)
            refined[ranks] = ranks[at[where.ravel()]]
        if np.array_equal(refined, roles):
            return roles
        roles = refined


def unanswered(traces: Traces) -> set[int]:
    """Return the sender and receiver of each message without a matching receive or send."""
    own = {
        rank
        for channel in match(traces).channels
        if channel.is_message and first_disagreement(traces, channel, call_signatures(traces, channel))
        for rank in channel.ranks
    }
    return own if traces.earlier is None else own | unanswered(traces.earlier)


def _role_peers(trace: Trace) -> list[Ints]:
    """Return the peers of every rank, at the same distances as in `trace`; each [world_size]."""
    rank, ranks = trace.traced.rank, np.arange(trace.traced.world_size)
    found = []
    for group, peers in peers_by_group(trace):
        axis = axis_of(group)
        if axis is None:
            continue
        for peer in sorted(peers):
            far = axis.place(np.array([peer]))[0] - axis.place(np.array([rank]))[0]
            found.append(ranks + ((axis.place(ranks) + far) % axis.size - axis.place(ranks)) * axis.stride)
    return found
