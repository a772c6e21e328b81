"""How a collective, a place in the code and the way that it is known are said."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.fault_tolerance.waits import Wait
from meshwright.spec.layout.schedule.action import ACTION_MARK
from meshwright.spec.run.flight_record import Collective, Departure, FlightRecord, Frame, Group
from meshwright.spec.run.heartbeat import Heartbeat

# Whose frames say nothing about a user's code.
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python")
# FSDP2's own object, which gathers and reduces the parameters of one module.
_UNIT = "FSDPParamGroup."


def module_of_wait(wait: Wait, record: FlightRecord | None) -> str | None:
    """Return the module that a collective belongs to, None where nothing tells.

    Parameters that are gathered ahead are those of another module than the one that was entered last, which only the
    stack shows. Elsewhere the module that was entered before it counts: a stack in a backward pass names none.
    """
    unit = _unit(record)
    return unit or wait.collective.module or (None if record is None else _innermost_module(record.stack))


def how_known(wait: Wait, record: FlightRecord | None) -> list[str]:
    """Return what the module of a wait is known from, in a sentence or none."""
    if _unit(record) is not None:
        return [f"the module is the one whose parameters rank {wait.rank}'s stack is gathering or reducing"]
    if wait.collective.module is not None:
        return [f"the module is the last that rank {wait.rank} entered before the same collective of its first step"]
    if record is not None and _innermost_module(record.stack) is not None:
        return [f"the module is the innermost in rank {wait.rank}'s stack: no order of collectives was known yet"]
    return []


def say_collective(collective: Collective, group: Group) -> str:
    """Return such as "all_reduce 17 of tp (ranks 0 and 1)"."""
    members = "all ranks" if group.axis == "world" else f"{group.axis} ({say_ranks(group.ranks)})"
    number = f" {collective.sequence}" if collective.sequence else ""
    return f"{collective.op}{number} of {members}"


def say_kind(collective: Collective) -> str:
    """Return what a collective is and where it was asked for, without its group."""
    shapes = ", ".join("x".join(map(str, sizes)) or "scalar" for sizes in collective.sizes)
    where = f" in {collective.module}" if collective.module else ""
    phase = f" ({collective.phase})" if collective.phase else ""
    return f"{collective.op} of {shapes or 'nothing'}{where}{phase}"


def say_next(record: FlightRecord) -> str:
    """Return what a rank is expected to ask for next, empty where that is not known."""
    one = record.expected
    return "" if one is None else f"rank {record.rank}'s next is {say_kind(one)}, as in its first step"


def place_of_call(record: FlightRecord, collective: Collective) -> tuple[str, str | None]:
    """Return the line, in words, and the module from which a rank called a collective; "" and None of one that it has
    left: only the stack shows both.
    """
    key = (collective.group, collective.sequence)
    if not any((one.group, one.sequence) == key and not one.is_done for one in record.collectives):
        return "", None
    return f" {say_place(record.stack)}", _innermost_module(record.stack)


def say_departure(departure: Departure, place: str = "") -> str:
    """Return what a step asked for at a place, and what an earlier one had asked for instead."""
    known = "no more collectives" if departure.known is None else say_kind(departure.known)
    step = f"in step {departure.found.step} it asked for {say_kind(departure.found)}{place},"
    return f"{step} where its first step had {known}"


def say_ranks(ranks: Sequence[int]) -> str:
    """Return such as "rank 1", "ranks 1 and 3" or "ranks 0, 1, 2 and 5 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:3]]
    rest = [f"{len(ranks) - 3} more"] if len(ranks) > 4 else [str(rank) for rank in ranks[3:]]
    *most, last = [*shown, *rest]
    return f"ranks {', '.join(most)} and {last}"


def say_when(beat: Heartbeat) -> str:
    """Return a rank's step and phase."""
    return f"step {beat.step}, {beat.phase}" if beat.step else beat.phase


def say_place(stack: Sequence[Frame]) -> str:
    """Return the line of code at which a rank is: the innermost that is no library's."""
    own = [frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)] or stack
    if not own:
        return "at an unknown place"
    module = _innermost_module(stack)
    where = "" if module is None else f", in module {module}"
    return f"at {own[-1].file}:{own[-1].line} in {own[-1].function}{where}"


def say_doing(beat: Heartbeat, waits: Sequence[Wait], record: FlightRecord | None, stack: Sequence[Frame]) -> str:
    """Return what a rank is waiting in, or the line that it is at."""
    if beat.waits_for_rank is not None:
        what = "exchange" if beat.phase.startswith(ACTION_MARK) else beat.phase
        return f"{what} with rank {beat.waits_for_rank}"
    if waits:
        wait = waits[-1]
        module = module_of_wait(wait, record)
        return say_collective(wait.collective, wait.group) + (f", {module}" if module else "")
    return say_place(stack)


def _unit(record: FlightRecord | None) -> str | None:
    """Return the module whose parameters the rank is gathering or reducing right now."""
    stack = [] if record is None else record.stack
    units = [frame.module for frame in stack if frame.function.startswith(_UNIT) and frame.module]
    return units[-1] if units else None


def _innermost_module(stack: Sequence[Frame]) -> str | None:
    named = [frame.module for frame in stack if frame.module]
    return named[-1] if named else None
