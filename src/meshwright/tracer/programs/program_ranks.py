"""trace_program(): the steps of all ranks of a user's program, extrapolated from as few traced ranks as possible.

Up to 64 ranks all are traced, since any one can have a mistake. Of more, ranks are traced

    by place        ranks 0, 1, the middle one and the last; along each axis of the mesh, as the groups that traced
                    ranks are in show it (ranks a constant stride apart), every place of up to 8, of a longer axis the
                    second and the last; and the places of several short axes together, where these are no more than 32
    by role         a rank's place along the axes that messages take, as in a pipeline, and the rows that FSDP2 leaves
                    it of each parameter, which follow from its place: the first and the last rank of each role

The traces of one role have to be equal, and their messages to go equally far. Where a rank's differs from that of most,
its place along each axis becomes part of the role, so that ranks which share a group with it have roles of their own,
as have those that it sends to (program_axes.py). A rank whose absence leaves a traced message without its other end is
traced, too: no deadlock is reported of messages that were extrapolated.

What is extrapolated: a rank that was not traced does what the first rank of its role does. A program that asks for one
rank's number, such as `rank == 37`, can be wrong there unseen; `every_rank` traces all.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

from meshwright.errors import UnsupportedError
from meshwright.spec.trace.trace import Ints, RecordKind, Trace
from meshwright.spec.trace.trace_order import fingerprint
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.extrapolate.program_axes import (
    LONG,
    Axis,
    axes_of_groups,
    axes_of_messages,
    axis_of,
    by_partners,
    calls_of,
    is_ring,
    unanswered,
    unknown_places,
    ways_of_messages,
)
from meshwright.tracer.extrapolate.rank_labels import CUT
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks

ALL_TRACED = 64
"""World sizes up to this one are traced rank by rank."""
_MOST_TRACED = 128
_SHORT = 8
"""Places of an axis of which each is traced; of a longer one the first, the second and the last."""
_MOST_TOGETHER = 32
"""Combinations of places along short axes that are traced."""


def trace_program(program: Program, *, every_rank: bool = False) -> Traces:
    """Return the traces of a program's ranks; traced ranks represent the others of their role.

    Raises UnsupportedError where a rank cannot be traced, or where too many roles differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _traced(program._replace(keeps_earlier=True, numbers_folder=folder), every_rank)


def _traced(program: Program, every_rank: bool) -> Traces:
    count = program.world_size
    if every_rank or count <= ALL_TRACED:
        return _of_roles(trace_ranks(program, range(count)), np.arange(count))
    found: dict[int, Trace] = {}
    prints: dict[int, str] = {}
    wanted = {0, 1, count // 2, count - 1}
    while new := wanted - set(found):
        found |= trace_ranks(program, sorted(new))
        prints |= {rank: _fingerprint(found[rank]) for rank in new}
        # Roles follow from how far messages go, so that has to be known first.
        if wanted := unknown_places(found):
            continue
        roles = by_partners(roles_of_ranks(found, count, *_all_odd(prints, found, count)), found)
        wanted = set(found) | _places(found, count) | _ends(roles)
        if wanted == set(found):
            wanted |= unanswered(_of_roles(found, roles))
        if len(wanted) > _MOST_TRACED:
            raise UnsupportedError(
                f"{program.build}: its {count} ranks have {len(np.unique(roles))} roles, too many: {len(wanted)} ranks "
                f"would be traced, and {_MOST_TRACED} is the most: use fewer ranks, or trace them all with --every-rank"
            )
    return _of_roles(found, roles)


def _of_roles(found: Mapping[int, Trace], roles: Ints) -> Traces:
    """Return the traces of the first rank of each role, and what came before their calls."""
    kept = {rank: found[rank] for rank in np.unique(roles).tolist()}
    before = {rank: trace.earlier for rank, trace in kept.items() if trace.earlier is not None}
    earlier = Traces(len(roles), before, roles) if len(before) == len(kept) else None
    return Traces(len(roles), kept, roles, earlier, tuple(sorted(found)))


def _fingerprint(trace: Trace) -> str:
    """Return a hash of what a rank does in the traced call and before it, and of the groups that it makes.

    Groups of one size can run along different axes: a rank that uses the wrong one does other than the rest.
    """
    axes = [axis_of(ranks) for part in calls_of(trace) for ranks in part.groups]
    own = repr(([call.ranks for call in trace.group_calls], axes, ways_of_messages(trace)))
    return sha256(own.encode()).hexdigest() + "".join(fingerprint(part) for part in calls_of(trace))


def roles_of_ranks(
    traces: dict[int, Trace], world_size: int, odd: Sequence[int] = (), alone: Sequence[int] = ()
) -> Ints:
    """Return for each rank the first one of its role, where ranks at the places of `odd` ones do other than most, and
    those of `alone` other than all [world_size].
    """
    ranks = np.arange(world_size)
    columns = [np.zeros(world_size, np.int64)]
    for axis in sorted(axes_of_messages(traces)):
        place = axis.place(ranks)
        # Positions of a chain differ: the further from an end, the longer the wait. In a ring all are equal, or
        # every other one, where neighbours alternate in sending.
        in_turns = axis.size > LONG and axis.size % 2 == 0 and is_ring(traces)
        columns.append(place % 2 if in_turns else place)
    for axis, rows in sorted(_cuts(traces)):
        share = -(-rows // axis.size)
        columns.append((rows - share * axis.place(ranks)).clip(0, share))
    axes = sorted(_axes(traces)) if odd else []
    for rank in odd:
        columns += [axis.place(ranks) == axis.place(ranks[rank : rank + 1]) for axis in axes]
    columns += [ranks == rank for rank in alone]
    _, first, where = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[where.ravel()], np.int64)


def _places(traces: Mapping[int, Trace], world_size: int) -> set[int]:
    """Return the ranks at each place of a short axis, and at the second and the last of a longer one, with all other
    places first; and those at all places of several short axes, where these are few.
    """
    axes = sorted(_axes(traces))
    wanted = {0}
    for axis in axes:
        wanted |= {axis.stride * place for place in (range(axis.size) if axis.size <= _SHORT else (1, axis.size - 1))}
    together, reach = {0}, 1
    for axis in axes:
        # Axes that overlap, as one that was flattened of others, are no further dimensions.
        if axis.size <= _SHORT and axis.stride >= reach and len(together) * axis.size <= _MOST_TOGETHER:
            together = {rank + axis.stride * place for rank in together for place in range(axis.size)}
            reach = axis.stride * axis.size
    return {rank for rank in wanted | together if rank < world_size}


def _axes(traces: Mapping[int, Trace]) -> set[Axis]:
    return axes_of_groups(traces) | axes_of_messages(traces)


def _ends(roles: Ints) -> set[int]:
    """Return the first and the last rank of each role."""
    last = len(roles) - 1 - np.unique(roles[::-1], return_index=True)[1]
    return {*np.unique(roles).tolist(), *last.tolist()}


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


def _all_odd(prints: Mapping[int, str], found: dict[int, Trace], world_size: int) -> tuple[list[int], list[int]]:
    """Return the traced ranks whose places make roles, as few as make the traces of each role equal, and those that
    differ even from the ranks at the same places.
    """
    odd: list[int] = []
    alone: list[int] = []
    # One by one: others like the first then have a role in common.
    while more := _odd(prints, roles_of_ranks(found, world_size, odd, alone)):
        rank = min(more)
        (alone if rank in odd else odd).append(rank)
    return odd, alone


def _odd(prints: Mapping[int, str], roles: Ints) -> set[int]:
    """Return the traced ranks that do other than most traced ranks of their role, by their traces' fingerprints."""
    by_role: dict[int, Counter[str]] = {}
    for rank, one in prints.items():
        by_role.setdefault(int(roles[rank]), Counter())[one] += 1
    usual = {role: counts.most_common(1)[0][0] for role, counts in by_role.items()}
    return {rank for rank, one in prints.items() if one != usual[int(roles[rank])]}
