"""The discrete-event engine: executes the programs of all ranks and reports when each record started.

    host      enqueues records on streams in program order, without pause; stops where it waits for the device
    stream    starts each record when the previous one has ended and the host has enqueued it
    comm op   (a collective or a message) starts when all its ranks have arrived and the previous op of its channel has
              finished; the streams that launched it continue at once, and waits for it end when it finishes

A stream runs ahead on its own clock until it waits for an event that is not complete, and resumes when the event
completes. Only communication ops are processed in order of time, since concurrent ones share links
(cost/communication/links.py). That order is correct: no new op can start before the next one finishes, because all
streams are blocked or done by then. Nothing is random, so the same programs always give the same result.

Slowdown of concurrent computation and communication:

    delay = slowdown x the seconds for which a rank computed while a communication op ran

The comm op ends later by the delay, and so does the rank's default stream: C seconds of computation over M of
communication take max(C, M) + slowdown x min(C, M), as in the planner (cost/communication/data_parallel.py) and with
the same constant, reduced where a limit is set on the SMs of communication (cost/communication/nccl_ctas.py). Source:
Galvatron (arXiv:2211.13878); both kernels share the device's SMs and memory bandwidth.
Ignored: which operations are delayed; computation on other streams; that a delayed comm op holds its links longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from meshwright.cost.communication.links import Links
from meshwright.simulator.engine.program import Instruction, RankProgram
from meshwright.spec.trace.timeline import Floats

RUN, WAIT, RECORD = int(Instruction.RUN), int(Instruction.WAIT), int(Instruction.RECORD)
PENDING = -1.0
"""The time of an event that is not complete."""


def run_programs(programs: Sequence[RankProgram], state: EngineState) -> Execution:
    """Execute the programs until none can continue, and return when each record started."""
    hosts = tuple(Host(program) for program in programs)
    for host in hosts:
        host.enqueue(state)
        state.runnable.append(host)
    while True:
        while state.runnable:
            state.runnable.pop().run(state)
        finished = state.links.next_end()
        if finished is None:
            break
        comm_op, at_s = finished
        state.finish(comm_op, at_s + _late_s(comm_op, at_s, state, hosts))
    num_comm_ops = len(state.missing)
    return Execution(hosts, np.array(state.began_at), np.array(state.completed_at[:num_comm_ops]))


def _late_s(comm_op: int, at_s: float, state: EngineState, hosts: Sequence[Host]) -> float:
    """Return the delay of a comm op whose ranks computed at the same time, and delay their computation."""
    began_s, late_s = state.began_at[comm_op], 0.0
    for member in state.members[comm_op]:
        default = hosts[member].streams[0]
        if default.now_s > began_s:
            late_s = max(late_s, default.slow_down(comm_op, began_s, at_s, state.slowdown[comm_op]))
    return late_s


@dataclass
class EngineState:
    """Events, pending communication ops, and the streams and hosts that can continue."""

    links: Links
    completed_at: list[float]
    """When each event completed. The first are the ends of communication ops."""
    missing: list[int]
    """Ranks that have yet to arrive at each communication op."""
    is_last: list[bool]
    """Whether a communication op is the last of its channel; else the next one has the next number."""
    is_first: list[bool]
    members: list[tuple[int, ...]]
    """Positions of the programs that take part in each communication op."""
    slowdown: list[float]
    """Of computation next to each communication op (engine.py)."""
    arrived_at: list[float]
    """When the last rank so far arrived."""
    began_at: list[float]
    waiting: dict[int, list[Stream | Host]] = field(default_factory=dict)
    runnable: list[Stream | Host] = field(default_factory=list)

    def complete(self, event: int, at_s: float) -> None:
        """Complete an event and wake its waiters."""
        self.completed_at[event] = at_s
        if event in self.waiting:
            self.runnable.extend(self.waiting.pop(event))

    def arrive(self, comm_op: int, at_s: float) -> None:
        """Count one more rank at a communication op, and start the op if it is ready."""
        self.missing[comm_op] -= 1
        if at_s > self.arrived_at[comm_op]:
            self.arrived_at[comm_op] = at_s
        if self.missing[comm_op] == 0 and (self.is_first[comm_op] or self.completed_at[comm_op - 1] >= 0.0):
            self._begin(comm_op)

    def finish(self, comm_op: int, at_s: float) -> None:
        """Finish a communication op, and start the next of its channel if all its ranks have arrived."""
        self.complete(comm_op, at_s)
        if not self.is_last[comm_op] and self.missing[comm_op + 1] == 0:
            self._begin(comm_op + 1)

    def _begin(self, comm_op: int) -> None:
        at_s = self.arrived_at[comm_op]
        if not self.is_first[comm_op]:
            at_s = max(at_s, self.completed_at[comm_op - 1])
        self.began_at[comm_op] = at_s
        self.links.start(comm_op, at_s)


class Stream:
    """One stream of one rank."""

    def __init__(self, program: RankProgram, number: int) -> None:
        self.number, self.records = number, np.flatnonzero(program.stream == number)
        self.issued_s = np.cumsum(program.times.host_s)[self.records]
        """When the host enqueues each record if it never stops."""
        self.instructions = program.instruction[self.records].tolist()
        self.events = program.event[self.records].tolist()
        self.seconds = program.times.device_s[self.records].tolist()
        self.enqueued_at: list[float] = []
        """When the host enqueued each record so far."""
        self.started_at: list[float] = []
        """When each record so far started; for a wait, when it ended."""
        self.now_s = 0.0
        """The end of the last record so far."""
        self.busy = Busy(self.seconds, self.started_at)
        self.late_s: dict[int, float] = {}
        """Delays from concurrent communication, by the position of the record after which they count."""
        self.slowed_by: dict[int, int] = {}
        """The last communication op that caused each delay."""

    def enqueue(self, until: int, stopped_s: float) -> None:
        """Enqueue all records before `until`, a position in the trace, after `stopped_s` of stops."""
        first = len(self.enqueued_at)
        self.enqueued_at.extend((self.issued_s[first : np.searchsorted(self.records, until)] + stopped_s).tolist())

    def run(self, state: EngineState) -> None:
        """Run until an event is not complete or no enqueued record is left."""
        instructions, events, seconds, completed_at = self.instructions, self.events, self.seconds, state.completed_at
        enqueued_at, started_at, now_s = self.enqueued_at, self.started_at, self.now_s
        for place in range(len(started_at), len(enqueued_at)):
            at_s = enqueued_at[place]
            if at_s > now_s:
                now_s = at_s
            instruction = instructions[place]
            if instruction == RUN:
                started_at.append(now_s)
                now_s += seconds[place]
                continue
            event = events[place]
            if instruction == WAIT:
                at_s = completed_at[event]
                if at_s == PENDING:
                    state.waiting.setdefault(event, []).append(self)
                    break
                if at_s > now_s:
                    now_s = at_s
            elif instruction == RECORD:
                state.complete(event, now_s)
            else:
                state.arrive(event, now_s)
            started_at.append(now_s)
            now_s += seconds[place]
        self.now_s = now_s

    def slow_down(self, comm_op: int, start_s: float, end_s: float, slowdown: float) -> float:
        """Delay the next record, since a communication op ran between these times; return the delay."""
        late_s = slowdown * self.busy.between(start_s, end_s)
        last = len(self.started_at) - 1
        self.late_s[last] = self.late_s.get(last, 0.0) + late_s
        self.slowed_by[last] = comm_op
        self.now_s += late_s
        return late_s

    @property
    def is_done(self) -> bool:
        """Return whether all records have started."""
        return len(self.started_at) == len(self.records)


class Host:
    """One rank's host."""

    def __init__(self, program: RankProgram) -> None:
        self.rank, self.host_s = program.rank, program.times.host_s
        self.streams = [Stream(program, number) for number in np.unique(program.stream).tolist()]
        self.issued_s = np.cumsum(self.host_s)
        """When it has enqueued each record if it never stops."""
        self.instruction, self.num_enqueued = program.instruction, program.num_enqueued
        self.syncs = [*program.syncs, (len(program.stream) - 1, -1)]
        self.stops: list[tuple[float, float]] = []
        """Start and end of its wait for the device at each sync so far."""
        self.stopped_s = 0.0
        self._next = 0

    def run(self, state: EngineState) -> None:
        """Continue after each sync whose event is complete."""
        while not self.is_done:
            record, event = self.syncs[self._next]
            if record >= self.num_enqueued:
                return
            ready_s = state.completed_at[event]
            if ready_s == PENDING:
                state.waiting.setdefault(event, []).append(self)
                return
            here_s = float(self.issued_s[record]) + self.stopped_s
            there_s = max(here_s, ready_s)
            self.stops.append((here_s, there_s))
            self.stopped_s += there_s - here_s
            self._next += 1
            self.enqueue(state)

    def enqueue(self, state: EngineState) -> None:
        """Enqueue all records up to the next sync."""
        until = min(self.syncs[self._next][0] + 1, self.num_enqueued)
        for stream in self.streams:
            stream.enqueue(until, self.stopped_s)
        state.runnable.extend(self.streams)

    def has_passed(self, record: int) -> bool:
        """Return whether a record has started on its stream."""
        return any(record in one.records[: len(one.started_at)] for one in self.streams)

    @property
    def is_done(self) -> bool:
        """Return whether no sync is left."""
        return self._next == len(self.syncs) - 1

    @property
    def end_s(self) -> float:
        """Return when it enqueued its last record."""
        return (float(self.issued_s[-1]) if len(self.issued_s) else 0.0) + self.stopped_s


@dataclass(frozen=True)
class Execution:
    """Times of all records and communication ops; incomplete in a deadlock."""

    hosts: tuple[Host, ...]
    """With their streams, in the order of the programs."""
    began_at: Floats
    """When each communication op started; -1 if it never did [comm_ops]."""
    ended_at: Floats
    """[comm_ops]"""
    seen: Mapping[int, tuple[Floats, Floats]] = field(default_factory=dict)
    """By rank the same two, where its own times differ from those of its class."""
    last_s: float = 0.0
    """When the last of all ranks was done, where `hosts` are the first of their classes."""

    @property
    def end_s(self) -> float:
        """Return when the last host or stream was done."""
        ends_s = (max((host.end_s, *(stream.now_s for stream in host.streams))) for host in self.hosts)
        return max(self.last_s, *ends_s)

    def times_of(self, rank: int) -> tuple[Floats, Floats]:
        """Return when each communication op of a rank started and ended [comm_ops]."""
        return self.seen.get(rank, (self.began_at, self.ended_at))

    @property
    def is_done(self) -> bool:
        """Return whether every record has started; else the step deadlocks."""
        return all(host.is_done and all(stream.is_done for stream in host.streams) for host in self.hosts)


class Busy:
    """Busy time of a stream, from the durations of its records and the times at which they started."""

    def __init__(self, durations_s: Sequence[float], started_at: list[float]) -> None:
        self._durations_s, self._started_at = durations_s, started_at
        self._before_s = [0.0, *accumulate(durations_s)]

    def between(self, start_s: float, end_s: float) -> float:
        """Return for how many of the seconds from `start_s` to `end_s` the stream computed."""
        first = max(bisect_right(self._started_at, start_s) - 1, 0)
        after = bisect_left(self._started_at, end_s)
        if after <= first:
            return 0.0
        too_early_s = min(max(start_s - self._started_at[first], 0.0), self._durations_s[first])
        last = after - 1
        too_late_s = max(self._started_at[last] + self._durations_s[last] - end_s, 0.0)
        return max(self._before_s[after] - self._before_s[first] - too_early_s - too_late_s, 0.0)
