"""deadlock_problems(): why an execution did not end.

A rank is blocked where a stream, or its host, waits for a communication op at which not all ranks have arrived. Each
missing rank is itself blocked, or has stopped: following the missing ranks leads to one that stopped, or to a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.simulator.checks.call_sites import call_site_of
from meshwright.simulator.engine.engine import Execution, Host
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import Instruction
from meshwright.spec.trace.trace_problem import CallSite, TraceProblem
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class _Blocked:
    """A blocked rank: its record, the communication op that it waits for, and the ranks missing there."""

    record: int
    comm_op: int
    missing: tuple[int, ...]
    lost: tuple[int, ...]
    """The missing ranks that have passed their record of the op: a message that was never sent."""


def deadlock_problems(traces: Traces, comm_ops: CommOps, execution: Execution) -> tuple[TraceProblem, ...]:
    """Return the problems of an execution; empty if it ended."""
    if execution.is_done:
        return ()
    blocked = {host.rank: _blocked_at(host, comm_ops, execution) for host in execution.hosts}
    waiting = {rank: one for rank, one in blocked.items() if one is not None}
    gone = [host for host in execution.hosts if host.num_enqueued < len(host.host_s)]
    if gone:
        return tuple(_stopped(traces, comm_ops, host, waiting) for host in gone)
    lost = [one for one in waiting.values() if one.lost]
    if lost:
        return tuple(_lost(traces, comm_ops, one, waiting) for one in lost[:1])
    return (_cycle(traces, comm_ops, waiting),)


def _blocked_at(host: Host, comm_ops: CommOps, execution: Execution) -> _Blocked | None:
    """Return the first record at which a rank is blocked; None if it is not."""
    found = []
    for stream in host.streams:
        place = len(stream.started_at)
        if place == len(stream.enqueued_at) or stream.instructions[place] != Instruction.WAIT:
            continue
        event = stream.events[place]
        if event < len(comm_ops):
            comm_op = _first_pending(event, comm_ops, execution)
            found.append(_Blocked(int(stream.records[place]), comm_op, *_absent(comm_op, comm_ops, execution)))
    return min(found, key=lambda one: one.record, default=None)


def _first_pending(comm_op: int, comm_ops: CommOps, execution: Execution) -> int:
    """Return the first unfinished communication op of the same channel, which blocks this one."""
    first = comm_ops.channel_of(comm_op).first
    while comm_op > first and execution.ended_at[comm_op - 1] < 0:
        comm_op -= 1
    return comm_op


def _absent(comm_op: int, comm_ops: CommOps, execution: Execution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the representatives that have not arrived at a communication op, and those of them that never will."""
    channel = comm_ops.channel_of(comm_op)
    hosts = {host.rank: host for host in execution.hosts}
    missing, lost = [], []
    for rank, rows in zip(channel.members, channel.rows, strict=True):
        record = int(rows[comm_op - channel.first])
        if not hosts[rank].has_passed(record):
            missing.append(rank)
        elif hosts[rank].instruction[record] != Instruction.LAUNCH:
            lost.append(rank)
    return tuple(missing + lost), tuple(lost)


def _waits(traces: Traces, comm_ops: CommOps, waiting: Mapping[int, _Blocked]) -> tuple[CallSite, ...]:
    """Return where ranks are blocked."""
    places = []
    for rank, one in waiting.items():
        channel = comm_ops.channel_of(one.comm_op)
        places.append(call_site_of(traces.traces[rank], one.record, channel.axis))
    return tuple(places)


def _stopped(traces: Traces, comm_ops: CommOps, host: Host, waiting: Mapping[int, _Blocked]) -> TraceProblem:
    others = {rank: one for rank, one in waiting.items() if rank != host.rank}
    return TraceProblem(
        kind="stopped",
        culprit=call_site_of(traces.traces[host.rank], host.num_enqueued),
        rule=f"rank {host.rank} stopped, and {_count(traces, others)} ranks (of {len(others)} classes) wait",
        others=_waits(traces, comm_ops, others),
    )


def _lost(traces: Traces, comm_ops: CommOps, one: _Blocked, waiting: Mapping[int, _Blocked]) -> TraceProblem:
    """Return the problem of a comm op at which a rank never arrives that is not blocked: a lost message."""
    channel = comm_ops.channel_of(one.comm_op)
    culprit = one.lost[0]
    rows = channel.rows[channel.members.index(culprit)]
    record = int(rows[one.comm_op - channel.first])
    return TraceProblem(
        kind="message" if channel.is_message else "collective",
        culprit=call_site_of(traces.traces[culprit], record, channel.axis),
        rule=f"rank {culprit} never sends a message that {_count(traces, waiting)} ranks wait for, directly or not",
        others=_waits(traces, comm_ops, waiting),
        group=channel.ranks,
    )


def _cycle(traces: Traces, comm_ops: CommOps, waiting: Mapping[int, _Blocked]) -> TraceProblem:
    seen: list[int] = []
    rank = min(waiting)
    while rank not in seen:
        seen.append(rank)
        rank = next(other for other in waiting[rank].missing if other in waiting)
    cycle = seen[seen.index(rank) :]
    common = Counter(map(_key, _waits(traces, comm_ops, waiting)))
    # The rank that waits where fewest others do comes first.
    places = sorted(_waits(traces, comm_ops, {one: waiting[one] for one in cycle}), key=lambda one: common[_key(one)])
    chain = [f"rank {one} for rank {other}" for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    # If no rank is alone in what it waits for, the culprit cannot be identified.
    is_tie = len(places) > 1 and common[_key(places[0])] == common[_key(places[1])]
    channel = comm_ops.channel_of(waiting[cycle[0]].comm_op)
    return TraceProblem(
        kind="deadlock",
        is_tie=is_tie,
        culprit=places[0],
        rule=f"deadlock: ranks wait in a cycle: {', '.join(chain)}",
        others=tuple(places[1:]),
        group=channel.ranks,
    )


def _key(place: CallSite) -> tuple[str, str, str]:
    return place.line or place.scope, place.op, place.axis


def _count(traces: Traces, ranks: Mapping[int, _Blocked]) -> int:
    """Return how many ranks these represent."""
    return sum(int((traces.class_of_rank == rank).sum()) for rank in ranks)
