"""check(): whether a step of these ranks can end, and if not, who is to blame.

First every channel is read: all members of a group have to run the same collectives in the same order, and every send
needs its receive, of the same bytes and format; where they first differ, the member that differs from most is named.
If they agree, the step is played with everything taking no time: whether it ends does not depend on how long things
take, since no stream chooses what to wait for. Where it does not, ranks wait in a circle, or for one that stopped.
Ignored: waits inside a communication library, such as for buffers, or for a message behind another of its pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np

from meshwright.simulator.apart import apart
from meshwright.simulator.collective_times import MeetingTimes
from meshwright.simulator.conditions import USUAL, Conditions
from meshwright.simulator.matching import Channel, Meetings, match
from meshwright.simulator.places import place_of
from meshwright.simulator.play_traces import Costs, play_traces
from meshwright.simulator.program import RecordTimes
from meshwright.simulator.stuck import stuck_problems
from meshwright.spec.action import Action, parse_cell
from meshwright.spec.problem import Problem
from meshwright.spec.trace import NONE, Trace
from meshwright.spec.traces import Traces

_UNEVEN = ("alltoall", "all_to_all")
"""Collectives to which ranks may bring different numbers of bytes."""


def check(traces: Traces, conditions: Conditions = USUAL) -> tuple[Problem, ...]:
    """Return why the step cannot end, or would compute nonsense; empty where nothing is wrong."""
    traces = apart(traces, [fault.rank for fault in conditions.faults])
    meetings = match(traces)
    mismatched = tuple(_mismatches(traces, meetings))
    if mismatched:
        return mismatched
    nothing = np.zeros(len(meetings))
    no_time = {rank: _no_time(trace) for rank, trace in traces.traces.items()}
    costs = Costs(no_time, MeetingTimes(nothing, nothing, nothing, nothing, nothing))
    return stuck_problems(traces, meetings, play_traces(traces, meetings, costs, conditions))


def _no_time(trace: Trace) -> RecordTimes:
    return RecordTimes(np.zeros(len(trace.records)), np.zeros(len(trace.records)))


def _mismatches(traces: Traces, meetings: Meetings) -> Iterator[Problem]:
    for channel in meetings.channels:
        asked = [_asked(traces.traces[rank], rows, channel) for rank, rows in _sides(channel)]
        longest = max(len(one) for one in asked)
        for number in range(longest):
            at = [one[number] if number < len(one) else None for one in asked]
            if len(set(at)) > 1:
                yield _mismatch(traces, channel, number, at)
                break


def _sides(channel: Channel) -> Iterator[tuple[int, np.ndarray]]:
    yield from zip(channel.members, channel.rows, strict=True)


def _asked(trace: Trace, rows: np.ndarray, channel: Channel) -> list[Hashable]:
    """Return what a member asks for in each meeting: what all have to agree on."""
    records = trace.records
    columns = (records.signature[rows], records.num_bytes[rows], records.action[rows])
    asked: list[Hashable] = []
    for signature, num_bytes, action in zip(*(column.tolist() for column in columns), strict=True):
        shapes = trace.signatures[signature]
        dtype = next((shape.dtype for shape in (*shapes.inputs, *shapes.outputs)), "")
        if channel.is_message:
            asked.append((num_bytes, dtype, _carried(trace.actions[action]) if action != NONE else None))
        else:
            is_uneven = any(name in shapes.op for name in _UNEVEN)
            asked.append((shapes.op, None if is_uneven else num_bytes, dtype))
    return asked


def _carried(action: str) -> Hashable:
    """Return which stage's output or gradient of which microbatch a pipeline's message carries."""
    found: tuple[Action, ...] = parse_cell(action)
    if len(found) != 1 or not found[0].kind.startswith(("SEND", "RECV")):
        return None
    kind, stage, microbatch = found[0]
    way = 1 if kind.endswith("F") else -1
    return kind[-1], stage - way if kind.startswith("RECV") else stage, microbatch


def _mismatch(traces: Traces, channel: Channel, number: int, at: list[Hashable]) -> Problem:
    """Return the problem of a channel's meeting in which members ask for different things."""
    culprit = _culprit(traces, channel, at)
    places = [
        place_of(traces.traces[rank], int(rows[number]) if number < len(rows) else NONE, channel.axis)
        for rank, rows in _sides(channel)
    ]
    return Problem(
        kind="message" if channel.is_message else "collective",
        culprit=places[culprit],
        rule=_rule(channel, number, at),
        others=tuple(place for place, one in zip(places, at, strict=True) if one != at[culprit])[:3],
        group=channel.ranks,
    )


def _culprit(traces: Traces, channel: Channel, at: list[Hashable]) -> int:
    """Return the member that does otherwise than most ranks; of a message's two the one with fewer messages."""
    if channel.is_message:
        return int(len(channel.rows[0]) > len(channel.rows[1]))
    weights: Counter[Hashable] = Counter()
    for rank, one in zip(channel.members, at, strict=True):
        weights[one] += int((traces.class_of_rank[list(channel.ranks)] == rank).sum())
    # Who asks for nothing at all is never right.
    usual = max(weights, key=lambda one: (one is not None, weights[one]))
    return next(place for place, one in enumerate(at) if one != usual)


def _rule(channel: Channel, number: int, at: list[Hashable]) -> str:
    along = f" along {channel.axis}" if channel.axis else ""
    if not channel.is_message:
        return (
            f"all ranks of a group{along} have to run the same collectives in the same order; number {number} differs"
        )
    sender, receiver = channel.ranks
    if None in at:
        lacks = "receive" if at[1] is None else "send"
        return f"message {number} from rank {sender} to rank {receiver}{along} has no {lacks}"
    return f"message {number} from rank {sender} to rank {receiver}{along} is sent as one thing and received as another"
