"""deadlock_problems(): why an execution did not end.

A rank is blocked where a stream, or its host, waits for a communication op at which not all ranks have arrived. Each
missing rank is itself blocked, or has stopped: following the missing ranks leads to one that stopped, or to a cycle.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

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
    return () if execution.is_done else _Deadlock(traces, comm_ops, execution).problems()


class _Deadlock:
    """An execution that did not end, and the ranks that are blocked in it."""

    def __init__(self, traces: Traces, comm_ops: CommOps, execution: Execution) -> None:
        self._traces, self._comm_ops, self._execution = traces, comm_ops, execution
        self._hosts = {host.rank: host for host in execution.hosts}
        blocked = {rank: self._blocked_at(host) for rank, host in self._hosts.items()}
        self._waiting = {rank: one for rank, one in blocked.items() if one is not None}

    def problems(self) -> tuple[TraceProblem, ...]:
        gone = [host for host in self._hosts.values() if host.num_enqueued < len(host.host_s)]
        if gone:
            return tuple(map(self._stopped, gone))
        lost = next((one for one in self._waiting.values() if one.lost), None)
        return (self._cycle() if lost is None else self._lost(lost),)

    def _blocked_at(self, host: Host) -> _Blocked | None:
        """Return the first record at which a rank is blocked; None if it is not."""
        found = []
        for stream in host.streams:
            place = len(stream.started_at)
            if place == len(stream.enqueued_at) or stream.instructions[place] != Instruction.WAIT:
                continue
            event = stream.events[place]
            if event < len(self._comm_ops):
                comm_op = self._first_pending(event)
                found.append(_Blocked(int(stream.records[place]), comm_op, *self._absent(comm_op)))
        return min(found, key=lambda one: one.record, default=None)

    def _first_pending(self, comm_op: int) -> int:
        """Return the first unfinished communication op of the same channel, which blocks this one."""
        first = self._comm_ops.channel_of(comm_op).first
        while comm_op > first and self._execution.ended_at[comm_op - 1] < 0:
            comm_op -= 1
        return comm_op

    def _absent(self, comm_op: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the representatives that have not arrived at a communication op, and those that never will."""
        channel = self._comm_ops.channel_of(comm_op)
        missing, lost = [], []
        for rank, rows in zip(channel.members, channel.rows, strict=True):
            record, host = int(rows[comm_op - channel.first]), self._hosts[rank]
            if not host.has_passed(record):
                missing.append(rank)
            elif host.instruction[record] != Instruction.LAUNCH:
                lost.append(rank)
        return tuple(missing + lost), tuple(lost)

    def _waits(self, waiting: Mapping[int, _Blocked]) -> tuple[CallSite, ...]:
        """Return where ranks are blocked."""
        return tuple(
            call_site_of(self._traces.traces[rank], one.record, self._comm_ops.channel_of(one.comm_op).axis)
            for rank, one in waiting.items()
        )

    def _stopped(self, host: Host) -> TraceProblem:
        others = {rank: one for rank, one in self._waiting.items() if rank != host.rank}
        return TraceProblem(
            kind="stopped",
            culprit=call_site_of(self._traces.traces[host.rank], host.num_enqueued),
            rule=f"rank {host.rank} stopped, and {self._count(others)} ranks (of {len(others)} classes) wait",
            others=self._waits(others),
        )

    def _lost(self, one: _Blocked) -> TraceProblem:
        """Return the problem of a comm op at which a rank never arrives that is not blocked: a lost message."""
        channel, culprit = self._comm_ops.channel_of(one.comm_op), one.lost[0]
        record = int(channel.rows[channel.members.index(culprit)][one.comm_op - channel.first])
        count = self._count(self._waiting)
        return TraceProblem(
            kind="message" if channel.is_message else "collective",
            culprit=call_site_of(self._traces.traces[culprit], record, channel.axis),
            rule=f"rank {culprit} never sends a message that {count} ranks wait for, directly or not",
            others=self._waits(self._waiting),
            group=channel.ranks,
        )

    def _cycle(self) -> TraceProblem:
        seen: list[int] = []
        rank = min(self._waiting)
        while rank not in seen:
            seen.append(rank)
            rank = next(other for other in self._waiting[rank].missing if other in self._waiting)
        cycle = seen[seen.index(rank) :]
        common = Counter(map(_key, self._waits(self._waiting)))
        # The rank that waits where fewest others do comes first.
        places = sorted(self._waits({one: self._waiting[one] for one in cycle}), key=lambda one: common[_key(one)])
        chain = [f"rank {one} for rank {other}" for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
        return TraceProblem(
            kind="deadlock",
            # If no rank is alone in what it waits for, the culprit cannot be identified.
            is_tie=len(places) > 1 and common[_key(places[0])] == common[_key(places[1])],
            culprit=places[0],
            rule=f"deadlock: ranks wait in a cycle: {', '.join(chain)}",
            others=tuple(places[1:]),
            group=self._comm_ops.channel_of(self._waiting[cycle[0]].comm_op).ranks,
        )

    def _count(self, ranks: Iterable[int]) -> int:
        """Return how many ranks these represent."""
        return int(np.isin(self._traces.class_of_rank, list(ranks)).sum())


def _key(place: CallSite) -> tuple[str, str, str]:
    return place.line or place.scope, place.op, place.axis
