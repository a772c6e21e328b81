"""The engine: plays the programs of all ranks at once, and says when each record was.

    host      hands records to streams in order, as fast as it can; stops where it waits for the device
    stream    plays its records in order: each begins when the one before has ended and the host has handed it over
    comm op   a collective or a message: begins when all who take part have arrive and the channel's last one has ended;
              the streams that came go on; who waits for it goes on when it ends

A stream needs no clock that others share: it plays on until it waits for a event that is not there, and goes on, later
in our time and not in its own, when the event comes. Only comm ops are execution in order of time, since those that are
under way at once share links (cost/communication/links.py). That order is right because nothing new can begin before
the next one
ends: by then all streams have execution as far as they could. Nothing is drawn, so that the same programs always finish the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.cost.communication.links import Links
from meshwright.simulator.engine.overlap_slowdown import Busy
from meshwright.simulator.engine.program import Instruction, RankProgram
from meshwright.spec.trace.timeline import Floats

RUN, WAIT, RECORD = int(Instruction.RUN), int(Instruction.WAIT), int(Instruction.RECORD)
PENDING = -1.0
"""The time of a event that is not there yet."""


def run_programs(programs: Sequence[RankProgram], state: EngineState) -> Execution:
    """Return when everything was that could be."""
    hosts = tuple(Host(program) for program in programs)
    for host in hosts:
        host.enqueue(state)
        state.runnable.append(host)
    while True:
        while state.runnable:
            state.runnable.pop().run(state)
        ended = state.links.next_end()
        if ended is None:
            break
        comm_op, at_s = ended
        state.finish(comm_op, at_s + _late_s(comm_op, at_s, state, hosts))
    num_comm_ops = len(state.missing)
    return Execution(hosts, np.array(state.began_at), np.array(state.completed_at[:num_comm_ops]))


def _late_s(comm_op: int, at_s: float, state: EngineState, hosts: Sequence[Host]) -> float:
    """Return by how much a comm op is late since its ranks computed next to it; their computing is then late, too."""
    began_s, late_s = state.began_at[comm_op], 0.0
    for member in state.members[comm_op]:
        default = hosts[member].streams[0]
        if default.now_s > began_s:
            late_s = max(late_s, default.slow_down(comm_op, began_s, at_s, state.slowdown))
    return late_s


@dataclass
class EngineState:
    """Where ranks meet: events that came, communication ops that fill, and who can go on."""

    links: Links
    completed_at: list[float]
    """When each event came. The first are the ends of communication ops."""
    missing: list[int]
    """How many have yet to arrive to each communication op."""
    is_last: list[bool]
    """Whether a communication op is its channel's last; else the next one has the next number."""
    is_first: list[bool]
    members: list[tuple[int, ...]]
    """Programs that take part in each communication op."""
    slowdown: float
    """Of computing and communicating at once, as slowdown.py has it."""
    arrived_at: list[float]
    """When the last of those who are there came."""
    began_at: list[float]
    waiting: dict[int, list[Stream | Host]] = field(default_factory=dict)
    runnable: list[Stream | Host] = field(default_factory=list)

    def complete(self, event: int, at_s: float) -> None:
        """Let a event arrive, and go on who waited for it."""
        self.completed_at[event] = at_s
        if event in self.waiting:
            self.runnable.extend(self.waiting.pop(event))

    def arrive(self, comm_op: int, at_s: float) -> None:
        """Let one more arrive to a communication op, which begins if nobody is missing."""
        self.missing[comm_op] -= 1
        if at_s > self.arrived_at[comm_op]:
            self.arrived_at[comm_op] = at_s
        if self.missing[comm_op] == 0 and (self.is_first[comm_op] or self.completed_at[comm_op - 1] >= 0.0):
            self._begin(comm_op)

    def finish(self, comm_op: int, at_s: float) -> None:
        """Let a communication op finish, and the next of its channel begin if all are there."""
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
        """When the host hands over each record, had it never stopped."""
        self.instructions = program.instruction[self.records].tolist()
        self.events = program.event[self.records].tolist()
        self.seconds = program.times.device_s[self.records].tolist()
        self.enqueued_at: list[float] = []
        """When the host handed over each record so far."""
        self.started_at: list[float] = []
        """When each record so far began, or went on after its wait."""
        self.now_s = 0.0
        """The finish of what was execution."""
        self.busy = Busy(self.seconds, self.started_at)
        self.late_s: dict[int, float] = {}
        """By how much what ran next to communication ended later, by the place of the last record then execution."""
        self.slowed_by: dict[int, int] = {}
        """The last communication op that made it so."""

    def enqueue(self, until: int, stopped_s: float) -> None:
        """Take all records before `until`, a position in the trace, from a host that had stopped for so long."""
        first = len(self.enqueued_at)
        self.enqueued_at.extend((self.issued_s[first : np.searchsorted(self.records, until)] + stopped_s).tolist())

    def run(self, state: EngineState) -> None:
        """Play on until a event is missing or the host has handed over no more."""
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
        """Return by how much what it plays next is late, since a communication op ran between these times."""
        late_s = slowdown * self.busy.between(start_s, end_s)
        last = len(self.started_at) - 1
        self.late_s[last] = self.late_s.get(last, 0.0) + late_s
        self.slowed_by[last] = comm_op
        self.now_s += late_s
        return late_s

    @property
    def is_done(self) -> bool:
        """Return whether all records were execution."""
        return len(self.started_at) == len(self.records)


class Host:
    """One rank's host."""

    def __init__(self, program: RankProgram) -> None:
        self.rank, self.host_s = program.rank, program.times.host_s
        self.streams = [Stream(program, number) for number in np.unique(program.stream).tolist()]
        self.issued_s = np.cumsum(self.host_s)
        """When it has handed over each record, had it never stopped."""
        self.instruction, self.num_enqueued = program.instruction, program.num_enqueued
        self.syncs = [*program.syncs, (len(program.stream) - 1, -1)]
        self.stops: list[tuple[float, float]] = []
        """From when to when it waited for the device at each sync so far."""
        self.stopped_s = 0.0
        self._next = 0

    def run(self, state: EngineState) -> None:
        """Go on after a sync, if its event is there."""
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
        """Hand over all records up to the next sync."""
        until = min(self.syncs[self._next][0] + 1, self.num_enqueued)
        for stream in self.streams:
            stream.enqueue(until, self.stopped_s)
        state.runnable.extend(self.streams)

    def has_passed(self, record: int) -> bool:
        """Return whether the record's stream has execution it."""
        return any(record in one.records[: len(one.started_at)] for one in self.streams)

    @property
    def is_done(self) -> bool:
        """Return whether no sync is left."""
        return self._next == len(self.syncs) - 1

    @property
    def end_s(self) -> float:
        """Return when it handed over its last record."""
        return (float(self.issued_s[-1]) if len(self.issued_s) else 0.0) + self.stopped_s


@dataclass(frozen=True)
class Execution:
    """What came of it."""

    hosts: tuple[Host, ...]
    """With their streams, in the order of the programs."""
    began_at: Floats
    """When each communication op began; -1 of one that never did [comm_ops]."""
    ended_at: Floats
    """[comm_ops]"""
    seen: Mapping[int, tuple[Floats, Floats]] = field(default_factory=dict)
    """The same two for a rank whose own times differ from those of other ranks that meet there."""
    last_s: float = 0.0
    """When the last of all ranks was done, if later than those of `hosts`."""

    @property
    def end_s(self) -> float:
        """Return when the last host or stream was done."""
        ends_s = (max((host.end_s, *(stream.now_s for stream in host.streams))) for host in self.hosts)
        return max(self.last_s, *ends_s)

    def times_of(self, rank: int) -> tuple[Floats, Floats]:
        """Return when each communication op began and ended, as a rank that takes part sees it [comm_ops]."""
        return self.seen.get(rank, (self.began_at, self.ended_at))

    @property
    def is_done(self) -> bool:
        """Return whether every record was execution; else somebody waits for ever."""
        return all(host.is_done and all(stream.is_done for stream in host.streams) for host in self.hosts)
