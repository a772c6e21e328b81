"""races(): tensors of one rank's step that two streams, or a stream and a collective, use in no defined order.

Each stream runs its records in order, and so does each group's communication. What orders two of them is an event that
one records and another waits for, a wait for a collective, or the host that waits for either: a vector clock holds, for
each stream and group, the last record of every other one that is known to have finished (as FastTrack by Flanagan and
Freund, 2009, does for threads). Two uses of one storage that are not ordered, one of which writes, are a race; so is
memory that its own stream can hand out again while another stream still uses it. Not reported: two collectives on one
tensor, and what only the next step uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.places import COMMUNICATION
from meshwright.spec.problem import RaceKind
from meshwright.spec.trace import NONE, Ints, RecordKind, Trace

_Clock = list[int]
_RECORD_STREAM = "aten.record_stream"
"""The operator by which a program makes the allocator wait for another stream."""
_NEVER = -1


@dataclass(frozen=True)
class Race:
    """Two records of one rank."""

    kind: RaceKind
    first: int
    """The collective that is not waited for, or the earlier of the two uses."""
    second: int
    """The use that is not ordered after it; -1 of a collective whose tensors are used no more in the step."""


def races_of(trace: Trace) -> tuple[Race, ...]:
    """Return the races of one rank's step, in the order of their first records; each record is named first once."""
    return tuple(_Detector(trace).races())


class _Detector:
    def __init__(self, trace: Trace) -> None:
        self._trace, records = trace, trace.records
        self._is_communication = np.isin(records.kind, COMMUNICATION)
        self._thread, self._count = _threads(trace, self._is_communication)
        self._stream = {number: index for index, number in enumerate(np.unique(records.stream).tolist())}
        self._clocks = [[_NEVER] * self._count for _ in range(self._count)]
        self._host: _Clock = [_NEVER] * self._count
        self._events: dict[int, _Clock] = {}
        self._works: dict[int, _Clock] = {}
        self._is_waited: set[int] = set()
        self._waits_for_earlier = False
        self._is_shared = self._shared()
        self._accesses: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By storage and thread: the last record that used it, and the last that wrote to it."""
        self._found: dict[int, Race] = {}

    def races(self) -> Iterator[Race]:
        records = self._trace.records
        uses, frees = self._uses(), self._frees()
        rows = np.flatnonzero(records.kind != RecordKind.OP).tolist()
        kinds, streams = records.kind.tolist(), records.stream.tolist()
        for row in sorted({*rows, *uses, *frees}):
            stream = self._stream[streams[row]]
            for storage in frees.get(row, ()):
                self._free(storage, row)
            if kinds[row] != RecordKind.OP:
                self._synchronize(row, kinds[row], stream)
            for storage, writes in uses.get(row, ()):
                self._use(storage, row, writes=writes)
        yield from sorted((*self._found.values(), *self._never_used()), key=lambda race: race.first)

    def _shared(self) -> NDArray[np.bool_]:
        """Return which storages more than one thread uses, or another than the stream that they were made on."""
        uses, storages = self._trace.uses, self._trace.storages
        made_on = np.array([self._stream.get(number, _NEVER) for number in storages.stream.tolist()], np.int64)
        owner = np.where(storages.allocated_at == NONE, _NEVER, made_on)
        first = np.full(len(storages), _NEVER, np.int64)
        first[uses.storage[::-1]] = self._thread[uses.record][::-1]
        found = (owner != _NEVER) & (first != _NEVER) & (owner != first)
        found[uses.storage[self._thread[uses.record] != first[uses.storage]]] = True
        return np.asarray(found, np.bool_)

    def _uses(self) -> dict[int, list[tuple[int, bool]]]:
        """Return by record the shared storages that it uses, and whether it writes to each."""
        uses = self._trace.uses
        found: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        rows = np.flatnonzero(self._is_shared[uses.storage])
        columns = (uses.record[rows], uses.storage[rows], uses.writes[rows])
        for record, storage, writes in zip(*(column.tolist() for column in columns), strict=True):
            found[record].append((storage, bool(writes)))
        return found

    def _frees(self) -> dict[int, list[int]]:
        """Return by record the storages whose memory it may get: the first allocation on their stream since the free.

        Not those that the program told the allocator of other streams of.
        """
        storages, records = self._trace.storages, self._trace.records
        is_told = np.array([*(one.op.startswith(_RECORD_STREAM) for one in self._trace.signatures), False])
        told = set(self._trace.uses.storage[is_told[records.signature[self._trace.uses.record]]].tolist())
        made = {
            stream: np.sort(storages.allocated_at[(storages.stream == stream) & (storages.allocated_at != NONE)])
            for stream in np.unique(storages.stream).tolist()
        }
        found: dict[int, list[int]] = defaultdict(list)
        for storage in np.flatnonzero(self._is_shared & (storages.freed_at != NONE)).tolist():
            later = made[int(storages.stream[storage])]
            place = int(np.searchsorted(later, storages.freed_at[storage]))
            if place < len(later) and storage not in told:
                found[int(later[place])].append(storage)
        return found

    def _synchronize(self, row: int, kind: int, stream: int) -> None:
        """Follow what one record orders."""
        records, clock = self._trace.records, self._clocks[stream]
        event, work = int(records.event[row]), int(records.work[row])
        if kind == RecordKind.RECORD_EVENT:
            self._events[event] = self._now(stream, row)
        elif kind == RecordKind.WAIT_EVENT:
            self._clocks[stream] = _joined(clock, self._events.get(event, clock))
        elif kind == RecordKind.HOST_SYNC:
            self._host = _joined(
                self._host, self._now(stream, row) if event == NONE else self._events.get(event, clock)
            )
        elif kind == RecordKind.WAIT:
            self._waits_for_earlier |= work != NONE and work not in self._works
            self._is_waited.add(work)
            self._clocks[stream] = _joined(clock, self._works.get(work, clock))
        else:
            thread = int(self._thread[row])
            issued = self._now(stream, row)
            self._clocks[thread] = _joined(self._clocks[thread], issued)
            self._clocks[thread][thread] = row
            self._works[work] = list(self._clocks[thread])

    def _now(self, stream: int, row: int) -> _Clock:
        """Return what has finished when a stream reaches a record, itself included."""
        clock = _joined(self._clocks[stream], self._host)
        clock[stream] = row
        return clock

    def _use(self, storage: int, row: int, *, writes: bool) -> None:
        thread = int(self._thread[row])
        clock, used = self._clocks[thread], self._accesses[storage]
        for other, (last_use, last_write) in used.items():
            conflict = last_use if writes else last_write
            if other == thread or max(clock[other], self._host[other]) >= conflict:
                continue
            if not (self._is_communication[conflict] and self._is_communication[row]):
                self._found.setdefault(conflict, Race(self._kind(conflict, row), conflict, row))
        use, write = used.get(thread, (_NEVER, _NEVER))
        used[thread] = (max(use, row), row if writes else write)

    def _free(self, storage: int, row: int) -> None:
        """Notice that other streams use memory which its own stream may hand out again at a record."""
        stream = self._stream.get(int(self._trace.storages.stream[storage]))
        for other, (last_use, _) in self._accesses.get(storage, {}).items():
            if stream is None or other == stream or self._is_communication[last_use]:
                continue
            if max(self._clocks[stream][other], self._host[other]) < last_use:
                self._found.setdefault(last_use, Race("freed across streams", last_use, row))

    def _kind(self, first: int, second: int) -> RaceKind:
        """Return what is missing between two uses."""
        if not self._is_communication[first]:
            return "across streams"
        records = self._trace.records
        waits = np.flatnonzero((records.kind == RecordKind.WAIT) & (records.work == records.work[first]))
        if not len(waits):
            return "never waited for"
        # Another stream than that of the second use has waited.
        return "across streams" if waits[0] < second else "used before its wait"

    def _never_used(self) -> Iterator[Race]:
        """Yield communication that nothing waits for and whose tensors are not used again in the step.

        A program that waits for works of the step before leaves those of this one to the next.
        """
        if self._waits_for_earlier:
            return
        done = self._host
        for stream in self._stream.values():
            done = _joined(done, self._clocks[stream])
        for row in np.flatnonzero(self._is_communication).tolist():
            if done[int(self._thread[row])] < row and row not in self._found:
                yield Race("never waited for", row, NONE)


def _threads(trace: Trace, is_communication: NDArray[np.bool_]) -> tuple[Ints, int]:
    """Return for each record which of the things that run in order of their own it is part of, and how many there are.

    The streams come first; then the communication of each group, and for messages of each of its ranks.
    """
    records = trace.records
    streams, thread = np.unique(records.stream, return_inverse=True)
    rows = np.flatnonzero(is_communication)
    columns = np.stack([records.kind[rows] != RecordKind.COLLECTIVE, records.group[rows], records.peer[rows]])
    kinds, of_row = np.unique(columns, axis=1, return_inverse=True)
    thread = thread.ravel().astype(np.int64)
    thread[rows] = len(streams) + of_row.ravel()
    return thread, len(streams) + kinds.shape[1]


def _joined(one: _Clock, other: _Clock) -> _Clock:
    return [a if a > b else b for a, b in zip(one, other, strict=True)]
