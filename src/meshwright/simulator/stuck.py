"""stuck_problems(): why a step that was played stands still.

A rank stands where one of its streams, or its host, waits for a meeting to which not all have come. Who has not come
stands somewhere else, or has stopped: one follows from each rank to those that it waits for, until one comes to a rank
that stopped, or to where one has been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.simulator.engine import Host, Played
from meshwright.simulator.matching import Meetings
from meshwright.simulator.places import place_of
from meshwright.simulator.program import Instruction
from meshwright.spec.problem import Place, Problem
from meshwright.spec.traces import Traces


@dataclass(frozen=True)
class _Standing:
    """A rank that waits: at which record, for which meeting, and for whom."""

    record: int
    meeting: int
    missing: tuple[int, ...]
    lost: tuple[int, ...]
    """Those of the missing that have passed the place where they should have come: a message that was never sent."""


def stuck_problems(traces: Traces, meetings: Meetings, played: Played) -> tuple[Problem, ...]:
    """Return the problems of a step that was played as far as it went; empty if it ended."""
    if played.is_done:
        return ()
    standing = {host.rank: _standing(host, meetings, played) for host in played.hosts}
    waiting = {rank: one for rank, one in standing.items() if one is not None}
    gone = [host for host in played.hosts if host.num_handed < len(host.host_s)]
    if gone:
        return tuple(_stopped(traces, meetings, host, waiting) for host in gone)
    lost = [one for one in waiting.values() if one.lost]
    if lost:
        return tuple(_lost(traces, meetings, one, waiting) for one in lost[:1])
    return (_circle(traces, meetings, waiting),)


def _standing(host: Host, meetings: Meetings, played: Played) -> _Standing | None:
    """Return what a rank waits for that others have not come to, its first record that does."""
    found = []
    for stream in host.streams:
        place = len(stream.played_at)
        if place == len(stream.handed_at) or stream.instructions[place] != Instruction.WAIT:
            continue
        signal = stream.signals[place]
        if signal < len(meetings):
            meeting = _first_pending(signal, meetings, played)
            found.append(_Standing(int(stream.records[place]), meeting, *_absent(meeting, meetings, played)))
    return min(found, key=lambda one: one.record, default=None)


def _first_pending(meeting: int, meetings: Meetings, played: Played) -> int:
    """Return the meeting of the same channel that holds this one up."""
    first = meetings.channels[int(meetings.channel[meeting])].first
    while meeting > first and played.ended_at[meeting - 1] < 0:
        meeting -= 1
    return meeting


def _absent(meeting: int, meetings: Meetings, played: Played) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the representatives that have not come to a meeting, and those of them that never will."""
    channel = meetings.channels[int(meetings.channel[meeting])]
    hosts = {host.rank: host for host in played.hosts}
    missing, lost = [], []
    for rank, rows in zip(channel.members, channel.rows, strict=True):
        record = int(rows[meeting - channel.first])
        if not hosts[rank].has_passed(record):
            missing.append(rank)
        elif hosts[rank].instruction[record] != Instruction.MEET:
            lost.append(rank)
    return tuple(missing + lost), tuple(lost)


def _waits(traces: Traces, meetings: Meetings, waiting: Mapping[int, _Standing]) -> tuple[Place, ...]:
    """Return what waiting ranks have come to and others not."""
    places = []
    for rank, one in waiting.items():
        channel = meetings.channels[int(meetings.channel[one.meeting])]
        places.append(place_of(traces.traces[rank], one.record, channel.axis))
    return tuple(places)


def _stopped(traces: Traces, meetings: Meetings, host: Host, waiting: Mapping[int, _Standing]) -> Problem:
    others = {rank: one for rank, one in waiting.items() if rank != host.rank}
    return Problem(
        kind="stopped",
        culprit=place_of(traces.traces[host.rank], host.num_handed),
        rule=f"rank {host.rank} stopped, and {len(others)} others that stand for {_count(traces, others)} ranks wait",
        others=_waits(traces, meetings, others),
    )


def _lost(traces: Traces, meetings: Meetings, one: _Standing, waiting: Mapping[int, _Standing]) -> Problem:
    """Return the problem of a meeting to which one never comes that waits for nothing: a message that was lost."""
    channel = meetings.channels[int(meetings.channel[one.meeting])]
    culprit = one.lost[0]
    rows = channel.rows[channel.members.index(culprit)]
    record = int(rows[one.meeting - channel.first])
    return Problem(
        kind="message" if channel.is_message else "collective",
        culprit=place_of(traces.traces[culprit], record, channel.axis),
        rule=f"rank {culprit} never sends what {_count(traces, waiting)} ranks wait for, at once or after each other",
        others=_waits(traces, meetings, waiting),
        group=channel.ranks,
    )


def _circle(traces: Traces, meetings: Meetings, waiting: Mapping[int, _Standing]) -> Problem:
    seen: list[int] = []
    rank = min(waiting)
    while rank not in seen:
        seen.append(rank)
        rank = next(other for other in waiting[rank].missing if other in waiting)
    circle = seen[seen.index(rank) :]
    places = _rarest_first(_waits(traces, meetings, {one: waiting[one] for one in circle}))
    told = [f"rank {one} for rank {other}" for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
    channel = meetings.channels[int(meetings.channel[waiting[circle[0]].meeting])]
    return Problem(
        kind="deadlock",
        culprit=places[0],
        rule=f"ranks wait in a circle: {', '.join(told)}",
        others=places[1:],
        group=channel.ranks,
    )


def _rarest_first(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return places with those first at which fewest ranks wait: where others wait elsewhere, one took another way."""
    common = Counter((place.line or place.scope, place.op) for place in places)
    return tuple(sorted(places, key=lambda place: common[place.line or place.scope, place.op]))


def _count(traces: Traces, ranks: Mapping[int, _Standing]) -> int:
    """Return how many ranks these stand for."""
    return sum(int((traces.class_of_rank == rank).sum()) for rank in ranks)
