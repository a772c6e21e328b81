"""Which rank waits for which, and in which collective, and the texts of a diagnosis.

Which rank waits for which, and in which collective, from the flight records of all ranks.
The k-th collective of a group is the same one on each of its ranks. A rank that has entered the k-th and not left it
waits for those that have not entered it. A rank that others wait for and that waits for none is the suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.spec.layout.schedule.action import ACTION_MARK
from meshwright.spec.run.rank_records import Collective, Departure, FlightRecord, Frame, Heartbeat, ProcessGroupRecord

# Paths of libraries, whose frames are not user code.
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python")
# FSDP2's class that all-gathers and reduces the parameters of one module.
_UNIT = "FSDPParamGroup."


def module_of_wait(wait: Wait, record: FlightRecord | None) -> str | None:
    """Return the module that a collective belongs to, None if unknown.

    Prefetched parameters belong to another module than the last one entered, which only the stack shows. Otherwise it
    is the last module entered: a stack in a backward pass names none.
    """
    unit = _unit(record)
    return unit or wait.collective.module or (None if record is None else _innermost_module(record.stack))


def module_source(wait: Wait, record: FlightRecord | None) -> list[str]:
    """Return how the module of a wait is known, in one sentence or none."""
    if _unit(record) is not None:
        return [f"the module is the one whose parameters rank {wait.rank}'s stack is all-gathering or reducing"]
    if wait.collective.module is not None:
        return [f"the module is the last that rank {wait.rank} entered before the same collective of its first step"]
    if record is not None and _innermost_module(record.stack) is not None:
        return [f"the module is the innermost in rank {wait.rank}'s stack: no order of collectives was known yet"]
    return []


def collective_text(collective: Collective, group: ProcessGroupRecord) -> str:
    """Return a text such as "all_reduce 17 of tp (ranks 0 and 1)"."""
    members = "all ranks" if group.axis == "world" else f"{group.axis} ({ranks_text(group.ranks)})"
    number = f" {collective.sequence}" if collective.sequence else ""
    return f"{collective.op}{number} of {members}"


def op_text(collective: Collective) -> str:
    """Return the op, the shapes, the module and the phase of a collective."""
    shapes = ", ".join("x".join(map(str, sizes)) or "scalar" for sizes in collective.sizes)
    where = f" in {collective.module}" if collective.module else ""
    phase = f" ({collective.phase})" if collective.phase else ""
    return f"{collective.op} of {shapes or 'nothing'}{where}{phase}"


def expected_text(record: FlightRecord) -> str:
    """Return the collective that a rank is expected to call next, "" if unknown."""
    one = record.expected
    return "" if one is None else f"rank {record.rank}'s next is {op_text(one)}, as in its first step"


def call_location(record: FlightRecord, collective: Collective) -> tuple[str, str | None]:
    """Return the location, as text, and the module from which a rank called a pending collective, from its stack.

    "" and None for a collective that it has left.
    """
    key = (collective.group, collective.sequence)
    if not any((one.group, one.sequence) == key and not one.is_done for one in record.collectives):
        return "", None
    return f" {location_text(record.stack)}", _innermost_module(record.stack)


def departure_text(departure: Departure, place: str = "") -> str:
    """Return what a step called at a position, and what its first step had called there."""
    known = "no more collectives" if departure.known is None else op_text(departure.known)
    step = f"in step {departure.found.step} it asked for {op_text(departure.found)}{place},"
    return f"{step} where its first step had {known}"


def signals_text(signals: Mapping[int, str]) -> str:
    """Return which signal ended which ranks, such as "rank 1 was killed by SIGKILL"."""
    ranks: dict[str, list[int]] = {}
    for rank, name in sorted(signals.items()):
        ranks.setdefault(name, []).append(rank)
    return ", ".join(
        f"{ranks_text(same)} {'was' if len(same) == 1 else 'were'} killed by {name}" for name, same in ranks.items()
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 1", "ranks 1 and 3" or "ranks 0, 1, 2 and 5 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:3]]
    rest = [f"{len(ranks) - 3} more"] if len(ranks) > 4 else [str(rank) for rank in ranks[3:]]
    *most, last = [*shown, *rest]
    return f"ranks {', '.join(most)} and {last}"


def phase_text(beat: Heartbeat) -> str:
    """Return a rank's step and phase."""
    return f"step {beat.step}, {beat.phase}" if beat.step else beat.phase


def location_text(stack: Sequence[Frame]) -> str:
    """Return the innermost location in a stack that is not in a library."""
    own = [frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)] or stack
    if not own:
        return "at an unknown line of code"
    module = _innermost_module(stack)
    where = "" if module is None else f", in module {module}"
    return f"at {own[-1].file}:{own[-1].line} in {own[-1].function}{where}"


def activity_text(beat: Heartbeat, waits: Sequence[Wait], record: FlightRecord | None, stack: Sequence[Frame]) -> str:
    """Return what a rank waits for, or its location; "-" where its process has ended."""
    if beat.waits_for_rank is not None:
        what = "exchange" if beat.phase.startswith(ACTION_MARK) else beat.phase
        return f"{what} with rank {beat.waits_for_rank}"
    if waits:
        wait = waits[-1]
        module = module_of_wait(wait, record)
        return collective_text(wait.collective, wait.group) + (f", {module}" if module else "")
    return location_text(stack) if stack else "-"


def _unit(record: FlightRecord | None) -> str | None:
    """Return the module whose parameters the rank is all-gathering or reducing."""
    stack = [] if record is None else record.stack
    units = [frame.module for frame in stack if frame.function.startswith(_UNIT) and frame.module]
    return units[-1] if units else None


def _innermost_module(stack: Sequence[Frame]) -> str | None:
    named = [frame.module for frame in stack if frame.module]
    return named[-1] if named else None


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
