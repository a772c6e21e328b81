"""noisy_execution(): a simulated step again, with a clock for every rank instead of one for each class of ranks.

Ranks of a class run the same program, so each record is one operation on a vector of times, one element a rank: an
operation adds its seconds times each rank's noise factor (conditions.py), a wait takes the maximum of two vectors, and
a collective starts in each group when the last of the group's own ranks arrives. A rank therefore waits only for the
stragglers of its own groups, among 16,384 ranks as among 8. Nothing is traced or matched again.

The order of records does not depend on their durations, since no stream chooses what to wait for. Times of transfers
that share links, and the slowdown of concurrent computation, are those of the execution without noise. Ignored: how
noise changes which transfers share links.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshwright.simulator.engine.channel_instances import Instances, instances_of
from meshwright.simulator.engine.conditions import Conditions, RankNoise, group_noise, rank_factors
from meshwright.simulator.engine.engine import RECORD, RUN, WAIT, Execution, Host, Stream
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import waited_records
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.spec.trace.traces import Traces


def noisy_execution(traces: Traces, comm_ops: CommOps, execution: Execution, conditions: Conditions) -> Execution:
    """Return the execution of the first rank of each class, and the end of the last of all ranks.

    `execution` is the same step without noise.
    """
    state = _State(traces, comm_ops, execution, conditions)
    hosts = [_Host(host, traces, comm_ops, conditions) for host in execution.hosts]
    for host in hosts:
        host.enqueue(state)
        state.runnable.append(host)
    while state.runnable:
        state.runnable.pop().run(state)
    last_s = max(float(host.end_s.max()) for host in hosts)
    return Execution(
        tuple(host.first_rank() for host in hosts), execution.began_at, execution.ended_at, state.seen, last_s
    )


class _State:
    """Arrivals at communication ops, and their ends; each a vector over the instances of the channel."""

    def __init__(self, traces: Traces, comm_ops: CommOps, execution: Execution, conditions: Conditions) -> None:
        self.instances = [instances_of(channel, traces) for channel in comm_ops.channels]
        self._channels, self._channel = comm_ops.channels, comm_ops.channel.tolist()
        self._took_s = [
            _took_s(channel.axis, execution.ended_at[numbers] - execution.began_at[numbers], own, conditions)
            for channel, own in zip(comm_ops.channels, self.instances, strict=True)
            for numbers in (slice(channel.first, channel.first + channel.num_comm_ops),)
        ]
        self._missing = [len(self._channels[number].members) for number in self._channel]
        self._arrived_s: dict[int, Floats] = {}
        self._ended_s: dict[int, Floats] = {}
        self.num_comm_ops, nothing = len(comm_ops), np.full(len(comm_ops), -1.0)
        self.seen = {host.rank: (nothing.copy(), nothing.copy()) for host in execution.hosts}
        """By first rank of a class when each of its communication ops starts and ends; -1 of others."""
        self.completed_s: dict[int, Floats] = {}
        self.waiting: dict[int, list[_Stream | _Host]] = defaultdict(list)
        self.runnable: list[_Stream | _Host] = []

    def arrive(self, number: int, side: int, now_s: Floats) -> None:
        """Record the arrival of one side's ranks, and start the ops whose ranks have all arrived."""
        instances = self.instances[self._channel[number]]
        latest_s = instances.sides[side].latest(now_s, len(instances))
        if number in self._arrived_s:
            latest_s = np.maximum(latest_s, self._arrived_s[number])
        self._arrived_s[number] = latest_s
        self._missing[number] -= 1
        channel = self._channels[self._channel[number]]
        last = channel.first + channel.num_comm_ops - 1
        is_next = number == channel.first or number - 1 in self._ended_s
        while is_next and self._missing[number] == 0:
            self._run(number)
            is_next, number = number < last, min(number + 1, last)

    def complete(self, event: int, now_s: Floats) -> None:
        """Complete an event and wake its waiters."""
        self.completed_s[event] = now_s
        self.runnable.extend(self.waiting.pop(event, ()))

    def ended_s(self, number: int, side: int) -> Floats | None:
        """Return when a communication op ends for each rank of a side; None if it has not ended."""
        ended_s = self._ended_s.get(number)
        return None if ended_s is None else ended_s[self.instances[self._channel[number]].sides[side].instance]

    def _run(self, number: int) -> None:
        position = self._channel[number]
        channel, instances = self._channels[position], self.instances[position]
        began_s = self._arrived_s.pop(number)
        if number != channel.first:
            began_s = np.maximum(began_s, self._ended_s[number - 1])
        self._ended_s[number] = began_s + self._took_s[position][number - channel.first]
        for rank, side in zip(channel.members, instances.sides, strict=True):
            for times, at_s in zip(self.seen[rank], (began_s, self._ended_s[number]), strict=True):
                times[number] = at_s[side.instance[0]]
        self.runnable.extend(self.waiting.pop(number, ()))


def _took_s(axis: str, nominal_s: Floats, instances: Instances, conditions: Conditions) -> Floats:
    """Return the duration of each op of a channel with noise [ops, instances]."""
    drawn = (group_noise(conditions, axis, ranks, len(nominal_s)) for ranks in instances.ranks.tolist())
    if conditions.jitter == 0:
        return np.broadcast_to(nominal_s[:, None], (len(nominal_s), len(instances)))
    return np.asarray(nominal_s[:, None] * np.stack(list(drawn), axis=1))


class _Stream:
    """One stream of all ranks of a class."""

    def __init__(self, stream: Stream, host: _Host, noise: RankNoise) -> None:
        self.stream, self._host, self._noise = stream, host, noise
        self.now_s = np.zeros(len(host.ranks))
        self._place = 0
        self._enqueued: list[tuple[int, Floats]] = []
        """Positions up to which records were enqueued, and for how long the hosts had stopped before."""
        self.first: list[tuple[float, float, float]] = []
        """Of the first rank: when each record was enqueued, when it started, and its duration."""

    def enqueue(self, until: int, stopped_s: Floats) -> None:
        """Enqueue all records before `until`, a position in the trace, by hosts that have stopped for `stopped_s`."""
        self._enqueued.append((int(np.searchsorted(self.stream.records, until)), stopped_s))

    def run(self, state: _State) -> None:
        """Run until an event is not complete or no enqueued record is left."""
        while self._enqueued:
            until, stopped_s = self._enqueued[0]
            while self._place < until:
                if not self._step(self._place, stopped_s, state):
                    return
                self._place += 1
            self._enqueued.pop(0)

    def _step(self, place: int, stopped_s: Floats, state: _State) -> bool:
        """Run one record; return False if it waits for an event that is not complete."""
        stream, now_s = self.stream, self.now_s
        enqueued_s = stream.issued_s[place] + stopped_s
        now_s = np.maximum(now_s, enqueued_s)
        instruction, event = stream.instructions[place], stream.events[place]
        if instruction == WAIT:
            ready_s = self._host.ready_s(int(stream.records[place]), event, state)
            if ready_s is None:
                state.waiting[event].append(self)
                return False
            now_s = np.maximum(now_s, ready_s)
        elif instruction == RECORD:
            state.complete(event, now_s)
        elif instruction != RUN:
            state.arrive(event, self._host.side_of[int(stream.records[place])], now_s)
        began_s, first_s = float(now_s[0]), 0.0
        if stream.seconds[place] > 0:
            took_s = stream.seconds[place] * self._noise.next()
            now_s, first_s = now_s + took_s, float(took_s[0])
        if place in stream.late_s:
            now_s = now_s + stream.late_s[place]
        self.first.append((float(enqueued_s[0]), began_s, first_s))
        self.now_s = now_s
        return True


class _Host:
    """The hosts of all ranks of a class."""

    def __init__(self, host: Host, traces: Traces, comm_ops: CommOps, conditions: Conditions) -> None:
        self.host, self.ranks = host, np.flatnonzero(traces.class_of_rank == host.rank)
        rank_factor = rank_factors(conditions, self.ranks.tolist())
        self.streams = [
            _Stream(one, self, RankNoise(conditions, rank_factor, self.ranks, one.number)) for one in host.streams
        ]
        self.side_of = _sides(traces.traces[host.rank], comm_ops)
        """By record of a communication op, or of a wait for one, the rank's side of its channel."""
        self._stopped_s = np.zeros(len(self.ranks))
        self._stops: list[tuple[float, float]] = []

    def ready_s(self, record: int, event: int, state: _State) -> Floats | float | None:
        """Return when the event that a record waits for completes on each rank; None if it has not."""
        if event in state.completed_s:
            return state.completed_s[event]
        if event < state.num_comm_ops:
            return state.ended_s(event, self.side_of[record])
        return 0.0 if event == state.num_comm_ops else None

    def run(self, state: _State) -> None:
        """Continue after each host sync whose event is complete."""
        while not self._is_done:
            record, event = self.host.syncs[len(self._stops)]
            ready_s = self.ready_s(record, event, state)
            if ready_s is None:
                state.waiting[event].append(self)
                return
            here_s = self.host.issued_s[record] + self._stopped_s
            there_s = np.maximum(here_s, ready_s)
            self._stops.append((float(here_s[0]), float(there_s[0])))
            self._stopped_s = self._stopped_s + there_s - here_s
            self.enqueue(state)

    def enqueue(self, state: _State) -> None:
        """Enqueue all records up to the next sync."""
        until = self.host.syncs[len(self._stops)][0] + 1
        for stream in self.streams:
            stream.enqueue(until, self._stopped_s)
        state.runnable += self.streams

    @property
    def _is_done(self) -> bool:
        return len(self._stops) == len(self.host.syncs) - 1

    @property
    def end_s(self) -> Floats:
        """Return when each rank is done [ranks]."""
        enqueued_s = self.host.issued_s[-1] + self._stopped_s
        return np.asarray(np.max([enqueued_s, *(stream.now_s for stream in self.streams)], axis=0))

    def first_rank(self) -> Host:
        """Return the host with the times of the class's first rank."""
        for one in self.streams:
            stream = one.stream
            stream.enqueued_at, stream.started_at, stream.seconds = (
                list(column) for column in zip(*one.first, strict=True)
            )
            stream.now_s = float(one.now_s[0])
        self.host.stops, self.host.stopped_s = self._stops, float(self._stopped_s[0])
        return self.host


def _sides(trace: Trace, comm_ops: CommOps) -> dict[int, int]:
    rank, records = trace.traced.rank, trace.records
    number = comm_ops.of_record[rank]
    sides = {}
    for row in np.flatnonzero(number != NONE).tolist():
        channel = comm_ops.channel_of(number[row])
        if channel.is_message:
            sides[row] = int(records.kind[row] == RecordKind.RECEIVE)
        else:
            sides[row] = channel.members.index(rank)
    waited = waited_records(trace)
    for row in np.flatnonzero((records.kind == RecordKind.WAIT) & (waited != NONE)).tolist():
        sides[row] = sides[int(waited[row])]
    return sides
