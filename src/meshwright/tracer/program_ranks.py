"""trace_program(): the steps of all ranks of a user's own program, from as few traced ranks as show what they do.

Up to 64 ranks all are traced: a mistake can be made on any one. Of more, ranks are traced

    at the edges    ranks 0, 1, the middle one and the last; and along each axis of the mesh, as the groups of traced
                    ranks show it (ranks a constant stride apart), the second and the last place
    by role         a rank's place along the axes that messages take, as in a pipeline, and the rows that FSDP2 leaves
                    it of each parameter, which follow from its place: the first and the last rank of each role

The traces of one role have to be equal. Where a rank's differs from that of most, its place along each axis becomes
part of the role, so that ranks which share a group with it have roles of their own. What is extrapolated: a rank that
was not traced does what the first rank of its role does. A program that asks for one rank's number, such as
`rank == 37`, can be wrong there unseen; `every_rank` traces all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from meshwright.errors import UnsupportedError
from meshwright.spec.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace_order import fingerprint
from meshwright.spec.traces import Traces
from meshwright.tracer.classes import CUT
from meshwright.tracer.trace import Program, trace_ranks

ALL_TRACED = 64
"""World sizes up to this one are traced rank by rank."""
_MOST_TRACED = 128
_MOST_PLACES = 32
"""Places of an axis that are roles of their own; of a longer one the first, the last, the even and the odd ones are."""


class Axis(NamedTuple):
    """Ranks that communicate with each other: `size` of them, `stride` apart."""

    stride: int
    size: int

    def place(self, ranks: Ints) -> Ints:
        """Return the place of each rank along the axis."""
        return ranks // self.stride % self.size


def trace_program(program: Program, *, every_rank: bool = False, num_processes: int = 2) -> Traces:
    """Return the traces of a program's ranks; those that were traced stand for the others of their role.

    Raises UnsupportedError where a rank cannot be traced, or where too many roles differ.
    """
    count = program.world_size
    if every_rank or count <= ALL_TRACED:
        return Traces.all_of(trace_ranks(program, range(count), num_processes))
    found: dict[int, Trace] = {}
    prints: dict[int, str] = {}
    odd: set[int] = set()
    wanted = {0, 1, count // 2, count - 1}
    while new := wanted - set(found):
        found |= trace_ranks(program, sorted(new), num_processes)
        prints |= {rank: fingerprint(found[rank]) for rank in new}
        odd |= _odd(prints, roles_of_ranks(found, count, odd))
        roles = roles_of_ranks(found, count, odd)
        wanted = set(found) | _edges(found, count) | _ends(roles)
        if len(wanted) > _MOST_TRACED:
            raise UnsupportedError(
                f"{program.build}: its {count} ranks have {len(np.unique(roles))} roles, too many to trace the first "
                "and the last rank of each: use fewer ranks, or trace them all with --every-rank"
            )
    return Traces(count, {rank: found[rank] for rank in np.unique(roles).tolist()}, roles)


def roles_of_ranks(traces: dict[int, Trace], world_size: int, odd: Iterable[int] = ()) -> Ints:
    """Return for each rank the first one of its role, where `odd` ranks do other than most [world_size]."""
    ranks = np.arange(world_size)
    columns = [np.zeros(world_size, np.int64)]
    for axis in sorted(_message_axes(traces)):
        place = axis.place(ranks)
        if axis.size > _MOST_PLACES:
            place = np.select([place == 0, place == axis.size - 1], [0, 1], 2 + place % 2)
        columns.append(place)
    for axis, rows in sorted(_cuts(traces)):
        share = -(-rows // axis.size)
        columns.append((rows - share * axis.place(ranks)).clip(0, share))
    for rank in odd:
        columns += [axis.place(ranks) == axis.place(ranks[rank : rank + 1]) for axis in sorted(_axes(traces))]
        columns.append(ranks == rank)
    _, first, where = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[where.ravel()], np.int64)


def axis_of(ranks: tuple[int, ...]) -> Axis | None:
    """Return the axis that a group runs along; None of one whose ranks are not a constant stride apart."""
    strides = np.unique(np.diff(ranks))
    if len(strides) != 1 or strides[0] <= 0:
        return None
    axis = Axis(int(strides[0]), len(ranks))
    return axis if axis.place(np.array(ranks[:1]))[0] == 0 else None


def _edges(traces: dict[int, Trace], world_size: int) -> set[int]:
    """Return the second and the last rank along each axis, with all other places first."""
    places = {axis.stride * place for axis in _axes(traces) for place in (1, axis.size - 1)}
    return {rank for rank in places if rank < world_size}


def _axes(traces: dict[int, Trace]) -> set[Axis]:
    groups = {ranks for trace in traces.values() for ranks in trace.groups}
    return {axis for ranks in groups if (axis := axis_of(ranks)) is not None}


def _ends(roles: Ints) -> set[int]:
    """Return the first and the last rank of each role."""
    last = len(roles) - 1 - np.unique(roles[::-1], return_index=True)[1]
    return {*np.unique(roles).tolist(), *last.tolist()}


def _message_axes(traces: dict[int, Trace]) -> set[Axis]:
    """Return the axes along which messages go."""
    found = set()
    for trace in traces.values():
        is_message = np.isin(trace.records.kind, (RecordKind.SEND, RecordKind.RECEIVE))
        for group in np.unique(trace.records.group[is_message]).tolist():
            ranks = trace.groups[group] if group != NONE else tuple(range(trace.traced.world_size))
            if (axis := axis_of(ranks)) is not None:
                found.add(axis)
    return found


def _cuts(traces: dict[int, Trace]) -> set[tuple[Axis, int]]:
    """Return the rows of each parameter that FSDP2 cuts, and the axis of the reduce-scatter that follows the cut."""
    found = set()
    for trace in traces.values():
        is_cut = np.array([*(signature.op.startswith(CUT) for signature in trace.signatures), False])
        collectives = np.flatnonzero(trace.records.kind == RecordKind.COLLECTIVE)
        for row in np.flatnonzero(is_cut[trace.records.signature]).tolist():
            place = int(np.searchsorted(collectives, row))
            if place == len(collectives):
                continue
            axis = axis_of(trace.groups[int(trace.records.group[collectives[place]])])
            whole = trace.signatures[int(trace.records.signature[row])].inputs[:-1]
            if axis is not None:
                found |= {(axis, one.dims[0]) for one in whole if one.dims}
    return found


def _odd(prints: Mapping[int, str], roles: Ints) -> set[int]:
    """Return the traced ranks that do other than most traced ranks of their role, by their traces' fingerprints."""
    by_role: dict[int, Counter[str]] = {}
    for rank, one in prints.items():
        by_role.setdefault(int(roles[rank]), Counter())[one] += 1
    usual = {role: counts.most_common(1)[0][0] for role, counts in by_role.items()}
    return {rank for rank, one in prints.items() if one != usual[int(roles[rank])]}
