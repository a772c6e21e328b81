"""Classes of ranks that do the same, of which the first is simulated, and the groups of all ranks along a mesh axis.

group_equivalent()   of a fully traced program: ranks are in one class if their traces are equal up to rank numbers, and
                     if their groups, and the peers of their messages, have ranks of the same classes at the same
                     distances
split_classes()      a class of its own for each rank with a fault, and new classes for the ranks that it affects: two
                     ranks stay in one class while, axis by axis, their groups have members of the same classes and
                     their messages go to and come from the same classes. A slow rank, its tp group, its fsdp group and
                     all others are then four classes of each pipeline rank. The trace of a new representative is the
                     old one's, with its own groups and peers.

Both partitions are the coarsest with their property, found by color refinement (Weisfeiler and Leman 1968): start and
split until no class splits further. A representative then waits for the same as every rank of its class.

Groups of one mesh axis, of which a trace names only that of its own rank:

    mesh axis      members of a group are `stride` apart, and `stride` groups interleave, so that they tile the ranks
    other groups   shifted copies whose ranks are of the same classes, if none overlap

Source: torch's DeviceMesh numbers ranks in row-major order.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.errors import UnsupportedError
from meshwright.simulator.engine.matching import group_key
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.trace_order import fingerprint
from meshwright.spec.trace.traces import Traces


def group_equivalent(traces: Traces) -> Traces:
    """Return the traces of the first rank of each class; traces that are not of every rank are returned unchanged."""
    if len(traces.traces) < traces.world_size:
        return traces
    labels = _numbered([fingerprint(traces.traces[rank]) for rank in range(traces.world_size)])
    peers = [_peers(traces.traces[rank]) for rank in range(traces.world_size)]
    while True:
        of_label = first_of_label(labels)
        refined = _numbered([_role(traces.traces[rank], of_label, peers[rank]) for rank in range(traces.world_size)])
        if refined.max() == labels.max():
            break
        labels = refined
    class_of_rank = first_of_label(labels)
    return Traces(
        traces.world_size, {rank: traces.traces[rank] for rank in np.unique(class_of_rank).tolist()}, class_of_rank
    )


def _role(trace: Trace, class_of_rank: Ints, peers: list[tuple[int, int]]) -> Hashable:
    """Return the classes of a rank, of the ranks of its groups and of its peers."""
    groups = tuple(group_key(trace, group, class_of_rank) for group in range(len(trace.groups)))
    rank, count = trace.traced.rank, trace.traced.world_size
    messages = tuple((kind, int(class_of_rank[peer]), (peer - rank) % count) for kind, peer in peers)
    return int(class_of_rank[rank]), groups, messages


def _peers(trace: Trace) -> list[tuple[int, int]]:
    """Return the kinds of messages and their peers, in order of appearance."""
    records = trace.records
    rows = np.flatnonzero(np.isin(records.kind, (RecordKind.SEND, RecordKind.RECEIVE)) & (records.peer != NONE))
    pairs, first = np.unique(np.stack([records.kind[rows], records.peer[rows]], axis=1), axis=0, return_index=True)
    return [(int(kind), int(peer)) for kind, peer in pairs[np.argsort(first)]]


def _numbered(keys: list[Hashable]) -> Ints:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def first_of_label(labels: Ints) -> Ints:
    """Return for each rank the first one with its label."""
    _, first, where = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first[where.ravel()], np.int64)


def split_classes(traces: Traces, ranks: Iterable[int]) -> Traces:
    """Return the traces with each of `ranks` alone in its class.

    Raises UnsupportedError where a rank's groups cannot be inferred from its representative's.
    """
    counts = np.bincount(traces.class_of_rank)
    known = (rank for rank in sorted(set(ranks)) if rank < traces.world_size)
    wanted = [rank for rank in known if counts[traces.class_of_rank[rank]] > 1]
    if not wanted:
        return traces
    labels = traces.class_of_rank.copy()
    labels[wanted] = traces.world_size + np.array(wanted)
    axes = {rank: [groups_of_axis(group, traces) for group in trace.groups] for rank, trace in traces.traces.items()}
    ends = [one for rank, trace in traces.traces.items() for one in _partners(trace, traces, axes[rank])]
    num_classes = 0
    while len(np.unique(labels)) > num_classes:
        num_classes = len(np.unique(labels))
        for groups in axes.values():
            for rows in groups:
                labels = _refined(labels, rows)
        for partners in ends:
            other = np.where(partners == NONE, NONE, labels[partners])
            labels = np.unique(np.stack([labels, other]), axis=1, return_inverse=True)[1].ravel()
    class_of_rank = first_of_label(labels)
    found = {
        rank: with_groups_of(traces.of_rank(rank), rank, axes[int(traces.class_of_rank[rank])])
        for rank in np.unique(class_of_rank).tolist()
    }
    return replace(traces, traces=found, class_of_rank=class_of_rank)


def _partners(trace: Trace, traces: Traces, axes: Sequence[Ints]) -> Iterator[Ints]:
    """Yield for each peer of a representative the peers of all ranks of its class; -1 for other ranks [world_size].

    In a group of all ranks, as of a pipeline without groups of its own, the peers alone identify a rank's partners.
    """
    source, records = trace.traced.rank, trace.records
    has_peer = (records.peer != NONE) & (records.group != NONE)
    pairs = np.unique(np.stack([records.group[has_peer], records.peer[has_peer]], axis=1), axis=0)
    for group, peer in pairs.tolist():
        rows, ranks = axes[group], trace.groups[group]
        shift = ranks.index(peer) - ranks.index(source)
        partners = np.full(traces.world_size, NONE, np.int64)
        partners[rows] = np.roll(rows, -shift, axis=1)
        yield np.where(traces.class_of_rank == source, partners, NONE)


def _refined(labels: Ints, rows: Ints) -> Ints:
    """Return labels refined by the labels of the members of each rank's group."""
    _, of_row = np.unique(labels[rows], axis=0, return_inverse=True)
    of_rank = np.full(len(labels), NONE, np.int64)
    of_rank[rows] = of_row.reshape(-1, 1)
    _, refined = np.unique(np.stack([labels, of_rank]), axis=1, return_inverse=True)
    return np.asarray(refined.ravel(), np.int64)


def with_groups_of(trace: Trace, rank: int, axes: Sequence[Ints]) -> Trace:
    """Return a trace as that of another rank of its class, with the other rank's groups and peers.

    `axes` holds for each of the trace's groups all groups of the same axis [groups, members].
    """
    source = trace.traced.rank
    if rank == source:
        return trace
    groups, peers = list(trace.groups), trace.records.peer.copy()
    for number, (group, rows) in enumerate(zip(trace.groups, axes, strict=True)):
        if source not in group:
            continue
        at = np.argwhere(rows == rank)
        if not len(at):
            raise UnsupportedError(
                f"the step of rank {rank} cannot be inferred from that of rank {source}: ranks "
                f"{', '.join(map(str, group[:5]))} form a group that is not part of a mesh, so that the "
                f"group of rank {rank} is unknown: choose rank {source}"
            )
        own = rows[at[0, 0]]
        groups[number] = tuple(own.tolist())
        is_along = (trace.records.group == number) & (peers != NONE)
        places = {one: place for place, one in enumerate(group)}
        shift = int(at[0, 1]) - places[source]
        new = {one: int(own[(place + shift) % len(own)]) for one, place in places.items()}
        peers[is_along] = [new[one] for one in trace.records.peer[is_along].tolist()]
    return replace(
        trace,
        traced=trace.traced.replace(rank=rank),
        groups=tuple(groups),
        records=replace(trace.records, peer=peers),
    )


def sibling_groups(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the same axis and the same classes, members in the same order [groups, members]."""
    ranks = np.array(group)
    rows = _of_mesh(ranks, traces.world_size)
    rows = _shifted(ranks, traces.world_size) if rows is None else rows
    alike = rows[(traces.class_of_rank[rows] == traces.class_of_rank[ranks]).all(axis=1)]
    return alike if len(np.unique(alike)) == alike.size else ranks[None]


def groups_of_axis(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the group's mesh axis, of any classes [groups, members]."""
    rows = _of_mesh(np.array(group), traces.world_size)
    return sibling_groups(group, traces) if rows is None else rows


def mesh_groups(group: tuple[int, ...], world_size: int) -> Ints:
    """Return the groups of the group's mesh axis; the group alone if it is not part of a mesh [groups, members]."""
    rows = _of_mesh(np.array(group), world_size)
    return np.array([group]) if rows is None else rows


def _of_mesh(group: Ints, world_size: int) -> Ints | None:
    first, strides = int(group.min()), np.unique(np.diff(np.sort(group)))
    if len(group) == 1:
        return np.arange(world_size)[:, None]
    if len(strides) != 1:
        return None
    stride, width = int(strides[0]), int(strides[0]) * len(group)
    if first % width >= stride or world_size % width:
        return None
    firsts = (np.arange(0, world_size, width)[:, None] + np.arange(stride)).reshape(-1, 1)
    return np.asarray(firsts + (group - first))


def _shifted(group: Ints, world_size: int) -> Ints:
    return np.arange(-group.min(), world_size - group.max())[:, None] + group
