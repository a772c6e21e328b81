"""group_equivalent(): ranks of a fully traced program in classes that do the same, so that each is simulated once.

Two ranks are in one class if their traces are equal up to rank numbers, and if their groups, and the peers of their
messages, have ranks of the same classes at the same distances. The coarsest such partition is found by color
refinement: start from equal traces and split until no class splits further. A representative then waits for the same as
every rank of its class.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

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
