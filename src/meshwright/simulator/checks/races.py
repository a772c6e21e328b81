"""races_of(): tensors of one rank's step that two streams, or a stream and a collective, use in no defined order.

Each stream runs its records in order, and so does each group's communication. Two of them are ordered by an event that
one records and the other waits for, by a wait for a collective, or by the host that waits for either. A vector clock
holds for each stream and group the last record of every other one that is known to have finished (as FastTrack by
Flanagan and Freund, 2009, does for threads). A race is two unordered uses of one storage, one of which writes, or
memory that its own stream can reuse while another stream still uses it. Ignored: two collectives on one tensor, and
uses in the next step.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.checks.call_sites import COMMUNICATION
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.trace_problem import RaceKind

_Clock = list[int]
_RECORD_STREAM = "aten.record_stream"
"""The operator that makes the allocator wait for another stream."""
_NEVER = -1


@dataclass(frozen=True)
class Race:
    """Two records of one rank."""

    kind: RaceKind
    first: int
    """The collective without a wait, or the earlier of the two uses."""
    second: int
    """The use that is not ordered after it; -1 for a collective whose tensors are not used again in the step."""


def races_of(trace: Trace) -> tuple[Race, ...]:
    """Return the races of one rank's step, in the order of their first records; each record is named first once."""
    return tuple(_Detector(trace).races())


class _Finished(NamedTuple):
    """The records that have finished when `thread` reaches record `row`, itself included."""

    thread: int
    row: int
    clock: _Clock


class _Detector:
    def __init__(self, trace: Trace) -> None:
        self._trace, records = trace, trace.records
        self._is_communication = np.isin(records.kind, COMMUNICATION)
        self._streams = np.unique(records.stream)
        self._thread, self._count = _threads(trace, self._is_communication)
        self._stream_of_record = np.searchsorted(self._streams, records.stream)
        self._clocks = [[_NEVER] * self._count for _ in range(self._count)]
        """Those of streams include the records for which the host has waited."""
        self._events: dict[int, _Finished] = {}
        self._works: dict[int, _Finished] = {}
        self._is_waited: set[int] = set()
        self._waits_for_earlier = False
        self._stream_of_storage = self._numbered(trace.storages.stream)
        self._is_shared = self._shared()
        self._accesses: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By storage and thread: the last record that used it, and the last that wrote to it."""
        self._found: dict[int, Race] = {}

    def races(self) -> Iterator[Race]:
        records, uses = self._trace.records, self._trace.uses
        frees = self._frees()
        shared = np.flatnonzero(self._is_shared[uses.storage])
        shared = shared[np.argsort(uses.record[shared], kind="stable")]
        storages, writes = uses.storage[shared].tolist(), uses.writes[shared].astype(np.bool_).tolist()
        is_sync = records.kind != RecordKind.OP
        freeing = np.fromiter(frees, np.int64, len(frees))
        rows = np.unique(np.concatenate([np.flatnonzero(is_sync), uses.record[shared], freeing]))
        edges = np.searchsorted(uses.record[shared], [*rows.tolist(), len(records)]).tolist()
        columns = (rows, is_sync[rows], self._thread[rows])
        for index, (row, synchronizes, thread) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            for storage in frees.get(row, ()):
                self._free(storage, row)
            if synchronizes:
                self._synchronize(row)
            for use in range(edges[index], edges[index + 1]):
                self._use(storages[use], row, thread, writes=writes[use])
        yield from sorted((*self._found.values(), *self._never_used()), key=lambda race: race.first)

    def _numbered(self, streams: Ints) -> Ints:
        """Return the places of streams among those that records are on; -1 for others."""
        return np.where(np.isin(streams, self._streams), np.searchsorted(self._streams, streams), _NEVER)

    def _shared(self) -> NDArray[np.bool_]:
        """Return which storages are used by several threads, or by another than the stream that allocated them."""
        uses, storages = self._trace.uses, self._trace.storages
        owner = np.where(storages.allocated_at == NONE, _NEVER, self._stream_of_storage)
        first = np.full(len(storages), _NEVER, np.int64)
        first[uses.storage[::-1]] = self._thread[uses.record][::-1]
        found = (owner != _NEVER) & (first != _NEVER) & (owner != first)
        found[uses.storage[self._thread[uses.record] != first[uses.storage]]] = True
        return np.asarray(found, np.bool_)

    def _frees(self) -> dict[int, list[int]]:
        """Return by record the storages whose memory it may reuse: the first allocation on their stream since the free.

        Storages with a record_stream() are excluded.
        """
        storages, records = self._trace.storages, self._trace.records
        is_recorded = np.array([*(one.op.startswith(_RECORD_STREAM) for one in self._trace.signatures), False])
        is_freed = self._is_shared & (storages.freed_at != NONE)
        is_freed[self._trace.uses.storage[is_recorded[records.signature[self._trace.uses.record]]]] = False
        found: dict[int, list[int]] = defaultdict(list)
        for stream in np.unique(storages.stream).tolist():
            is_here = storages.stream == stream
            made = np.sort(storages.allocated_at[is_here & (storages.allocated_at != NONE)])
            gone = np.flatnonzero(is_freed & is_here)
            places = np.searchsorted(made, storages.freed_at[gone])
            is_used_again = places < len(made)
            rows = made[places[is_used_again]].tolist()
            for row, storage in zip(rows, gone[is_used_again].tolist(), strict=True):
                found[row].append(storage)
        return found

    def _synchronize(self, row: int) -> None:
        """Update the clocks for one record that synchronizes."""
        records, stream = self._trace.records, int(self._stream_of_record[row])
        kind, event, work = int(records.kind[row]), int(records.event[row]), int(records.work[row])
        if kind == RecordKind.RECORD_EVENT:
            self._events[event] = self._now(stream, row)
        elif kind == RecordKind.WAIT_EVENT:
            self._order(stream, self._events.get(event))
        elif kind == RecordKind.HOST_SYNC:
            finished = self._now(stream, row) if event == NONE else self._events.get(event)
            for other in range(len(self._streams)):
                self._order(other, finished)
        elif kind == RecordKind.WAIT:
            self._waits_for_earlier |= work != NONE and work not in self._works
            self._is_waited.add(work)
            self._order(stream, self._works.get(work))
        else:
            thread = int(self._thread[row])
            self._order(thread, self._now(stream, row))
            clock = self._clocks[thread]
            clock[thread] = row
            self._works[work] = _Finished(thread, row, list(clock))

    def _now(self, stream: int, row: int) -> _Finished:
        clock = list(self._clocks[stream])
        clock[stream] = row
        return _Finished(stream, row, clock)

    def _order(self, thread: int, finished: _Finished | None) -> None:
        """Order the next record of `thread` after finished ones; None for those of an earlier step."""
        # A clock that includes a record also includes its clock.
        if finished is not None and self._clocks[thread][finished.thread] < finished.row:
            self._clocks[thread] = [
                one if one > other else other for one, other in zip(self._clocks[thread], finished.clock, strict=True)
            ]

    def _use(self, storage: int, row: int, thread: int, *, writes: bool) -> None:
        clock, used = self._clocks[thread], self._accesses[storage]
        for other, (last_use, last_write) in used.items():
            conflict = last_use if writes else last_write
            if other == thread or clock[other] >= conflict:
                continue
            if not (self._is_communication[conflict] and self._is_communication[row]):
                self._found.setdefault(conflict, Race(self._kind(conflict, row), conflict, row))
        use, write = used.get(thread, (_NEVER, _NEVER))
        used[thread] = (max(use, row), row if writes else write)

    def _free(self, storage: int, row: int) -> None:
        """Check other streams' uses of memory that its own stream may reuse at a record."""
        stream = int(self._stream_of_storage[storage])
        for other, (last_use, _) in self._accesses.pop(storage, {}).items():
            if stream == _NEVER or other == stream or self._is_communication[last_use]:
                continue
            if self._clocks[stream][other] < last_use:
                self._found.setdefault(last_use, Race("freed across streams", last_use, row))

    def _kind(self, first: int, second: int) -> RaceKind:
        """Return the kind of race between two uses."""
        if not self._is_communication[first]:
            return "across streams"
        records = self._trace.records
        waits = np.flatnonzero((records.kind == RecordKind.WAIT) & (records.work == records.work[first]))
        if not len(waits):
            return "never waited for"
        # If there is an earlier wait, it was on another stream.
        return "across streams" if waits[0] < second else "used before its wait"

    def _never_used(self) -> Iterator[Race]:
        """Yield communication without a wait whose tensors are not used again in the step.

        A program that waits for works of the previous step leaves those of this step to the next.
        """
        if self._waits_for_earlier:
            return
        done = [max(rows) for rows in zip(*self._clocks[: len(self._streams)], strict=True)]
        for row in np.flatnonzero(self._is_communication).tolist():
            if done[int(self._thread[row])] < row and row not in self._found:
                yield Race("never waited for", row, NONE)


def _threads(trace: Trace, is_communication: NDArray[np.bool_]) -> tuple[Ints, int]:
    """Return the in-order queue ("thread") of each record, and how many there are.

    The streams come first, then the communication of each group, and of messages that with each peer.
    """
    records = trace.records
    streams, thread = np.unique(records.stream, return_inverse=True)
    rows = np.flatnonzero(is_communication)
    columns = np.stack([records.kind[rows] != RecordKind.COLLECTIVE, records.group[rows], records.peer[rows]])
    kinds, of_row = np.unique(columns, axis=1, return_inverse=True)
    thread = thread.ravel().astype(np.int64)
    thread[rows] = len(streams) + of_row.ravel()
    return thread, len(streams) + kinds.shape[1]
