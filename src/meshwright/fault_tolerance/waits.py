"""Which rank waits for which, and in which collective, from the flight records of all ranks.

The k-th collective of a group is the same one on each of its ranks. A rank that has entered the k-th and not left it
waits for those that have not entered it. A rank that others wait for and that waits for none is the suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.run.rank_records import Collective, FlightRecord, Heartbeat, ProcessGroupRecord

# Collectives whose inputs have the same shape on all ranks.
_SAME_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "allgather", "allreduce")


@dataclass(frozen=True)
class Wait:
    """A rank in an incomplete collective."""

    rank: int
    collective: Collective
    group: ProcessGroupRecord
    absent: list[int]
    """The ranks of the group that have not entered it according to their records."""


@dataclass(frozen=True)
class Mismatch:
    """A position in a group's order at which its ranks called different collectives."""

    group: ProcessGroupRecord
    by_rank: dict[int, Collective]


def waits_of(records: Mapping[int, FlightRecord]) -> list[Wait]:
    """Return the first incomplete collective of every group of every rank, by rank."""
    entered = {rank: _last_entered(record) for rank, record in records.items()}
    waits = []
    for rank, record in sorted(records.items()):
        groups = {group.name: group for group in record.groups}
        pending: dict[str, Collective] = {}
        for one in record.collectives:
            if not one.is_done:
                pending.setdefault(one.group, one)
        for name, one in pending.items():
            others = [peer for peer in groups[name].ranks if peer != rank]
            absent = [peer for peer in others if entered.get(peer, {}).get(name, 0) < one.sequence]
            waits.append(Wait(rank, one, groups[name], absent))
    return waits


def waited_for(waits: list[Wait], heartbeats: Mapping[int, Heartbeat]) -> dict[int, set[int]]:
    """Return the ranks that each rank waits for, in collectives and in pipeline P2P."""
    edges: dict[int, set[int]] = {rank: set() for rank in heartbeats}
    for wait in waits:
        edges[wait.rank].update(wait.absent)
    for rank, heartbeat in heartbeats.items():
        if heartbeat.waits_for_rank is not None:
            edges[rank].add(heartbeat.waits_for_rank)
    return edges


def roots(edges: Mapping[int, set[int]]) -> list[int]:
    """Return the ranks that others wait for and that wait for none themselves."""
    wanted = {peer for peers in edges.values() for peer in peers}
    return sorted(rank for rank in wanted if not edges.get(rank))


def first_mismatch(records: Mapping[int, FlightRecord]) -> Mismatch | None:
    """Return the first position at which the ranks of a stuck group called different collectives."""
    stuck = {wait.group.name: wait.group for wait in waits_of(records)}
    for name, group in sorted(stuck.items()):
        at_place: defaultdict[int, dict[int, Collective]] = defaultdict(dict)
        for rank in group.ranks:
            for one in records[rank].collectives if rank in records else ():
                if one.group == name:
                    at_place[one.sequence][rank] = one
        for sequence in sorted(at_place):
            if not _are_same(list(at_place[sequence].values())):
                return Mismatch(group, at_place[sequence])
    return None


def _last_entered(record: FlightRecord) -> dict[str, int]:
    """Return the sequence number of the newest collective that a rank entered in each group."""
    return {one.group: one.sequence for one in sorted(record.collectives, key=lambda one: one.sequence)}


def _are_same(collectives: list[Collective]) -> bool:
    first = collectives[0]
    same_sizes = first.op.lstrip("_").startswith(_SAME_SIZES)
    return all(one.op == first.op and (not same_sizes or one.sizes == first.sizes) for one in collectives)
