"""RankProgram: the trace of one rank as four instructions on streams, which the engine executes.

    RUN      an operation, for some seconds
    WAIT     until an event is complete
    RECORD   completes an event, once the stream reaches it
    LAUNCH   hands a communication op to the communication library; the stream continues at once

An event is the end of a communication op, a CUDA event, or a stream position for which the host waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Records, Trace


class Instruction(IntEnum):
    """What a stream does with a record."""

    RUN = 0
    """Takes its seconds; 0 of records that take the device no time."""
    WAIT = 1
    """Continues once its event is complete."""
    RECORD = 2
    """Completes its event."""
    LAUNCH = 3
    """Hands its communication op to the communication library, and continues."""


_INSTRUCTION_OF = {
    RecordKind.OP: Instruction.RUN,
    RecordKind.COLLECTIVE: Instruction.LAUNCH,
    RecordKind.SEND: Instruction.LAUNCH,
    RecordKind.RECEIVE: Instruction.LAUNCH,
    RecordKind.WAIT: Instruction.WAIT,
    RecordKind.RECORD_EVENT: Instruction.RECORD,
    RecordKind.WAIT_EVENT: Instruction.WAIT,
    RecordKind.HOST_SYNC: Instruction.RECORD,
}

# An enumeration's members are slow to look up.
_WAIT, _RECORD_EVENT, _WAIT_EVENT, _HOST_SYNC = (
    int(kind) for kind in (RecordKind.WAIT, RecordKind.RECORD_EVENT, RecordKind.WAIT_EVENT, RecordKind.HOST_SYNC)
)


@dataclass(frozen=True)
class RecordTimes:
    """Durations of one rank's records; one element a record."""

    device_s: Floats
    """Of an operation on its stream; 0 of other records."""
    host_s: Floats
    """Of the host's work before it enqueues the record."""


@dataclass(frozen=True)
class RankProgram:
    """One rank's step; one element a record unless said otherwise."""

    rank: int
    stream: Ints
    instruction: Ints
    event: Ints
    """Of WAIT and RECORD; of LAUNCH the communication op's number, which is also the number of its end's event."""
    times: RecordTimes
    syncs: tuple[tuple[int, int], ...]
    """Records after which the host stops, and the events for which it then waits."""
    num_enqueued: int
    """Records that the host enqueues: all, unless a fault stops it."""

    def failing(self, stops_at: int | None, dropped: Ints) -> RankProgram:
        """Return the program of a host that stops before record `stops_at` and never sends the messages `dropped`."""
        instruction = self.instruction.copy()
        instruction[dropped] = Instruction.RUN
        num_enqueued = self.num_enqueued if stops_at is None else stops_at
        return replace(self, instruction=instruction, num_enqueued=num_enqueued)


class EventIds:
    """Numbers of events: the ends of communication ops, then one that is always complete, then new ones."""

    def __init__(self, num_comm_ops: int) -> None:
        self.always = num_comm_ops
        self.count = num_comm_ops + 1

    def take(self, number: int) -> Ints:
        """Return `number` new ones."""
        self.count += number
        return np.arange(self.count - number, self.count)


def program_of(trace: Trace, comm_op: Ints, times: RecordTimes, ids: EventIds) -> RankProgram:
    """Return the program of a trace, given the communication op of each record (-1 for none) and their durations."""
    records = trace.records
    table = np.array([_INSTRUCTION_OF[kind] for kind in RecordKind])
    instruction = table[records.kind]
    event = np.full(len(records), ids.always, np.int64)
    launches = instruction == Instruction.LAUNCH
    event[launches] = comm_op[launches]
    is_recorded = instruction == Instruction.RECORD
    event[is_recorded] = ids.take(int(is_recorded.sum()))
    syncs = _set_waits(records, event)
    return RankProgram(
        rank=trace.traced.rank,
        stream=records.stream,
        instruction=instruction,
        event=event,
        times=times,
        syncs=tuple(syncs),
        num_enqueued=len(records),
    )


def on_one_stream(program: RankProgram) -> RankProgram:
    """Return the program of a host that computes itself: its seconds are the stream's, and it never waits."""
    times = program.times
    return replace(
        program,
        stream=np.zeros_like(program.stream),
        times=RecordTimes(times.device_s + times.host_s, np.zeros(len(times.host_s))),
        syncs=(),
    )


def _set_waits(records: Records, event: Ints) -> list[tuple[int, int]]:
    """Set the event of each wait; works and CUDA events from before the step are complete.

    Returns the records after which the host stops, each with its event: the position of its stream, or a CUDA event.
    """
    of_work: dict[int, int] = {}
    of_cuda_event: dict[int, int] = {}
    syncs = []
    rows = np.flatnonzero(records.kind != RecordKind.OP)
    columns = (rows, records.kind[rows], records.work[rows], records.event[rows], event[rows])
    for row, kind, work, cuda_event, own in zip(*(column.tolist() for column in columns), strict=True):
        if kind == _RECORD_EVENT:
            of_cuda_event[cuda_event] = own
        elif kind == _WAIT_EVENT:
            event[row] = of_cuda_event.get(cuda_event, own)
        elif kind == _WAIT:
            event[row] = of_work.get(work, own)
        elif kind != _HOST_SYNC:
            of_work[work] = own
        elif cuda_event == NONE or cuda_event in of_cuda_event:
            syncs.append((row, of_cuda_event.get(cuda_event, own)))
    return syncs


def waited_records(trace: Trace, *, with_copies: bool = False) -> Ints:
    """Return for each wait the record of the communication op that it waits for, or with `with_copies` of the copy
    between the memories of host and device; -1 for other records [records].
    """
    records = trace.records
    waited = np.full(len(records), NONE, np.int64)
    of_work: dict[int, int] = {}
    of_event: dict[int, int] = {}
    last_of_stream: dict[int, int] = {}
    is_copy = copies_of(trace) & with_copies
    is_quiet = (records.kind == RecordKind.OP) & (records.stream == 0)
    rows, kinds = np.flatnonzero(~is_quiet), list(RecordKind)
    columns = (rows, records.kind[rows], records.stream[rows], records.work[rows], records.event[rows])
    for row, number, stream, work, event in zip(*(column.tolist() for column in columns), strict=True):
        kind = kinds[number]
        if kind is RecordKind.WAIT:
            last_of_stream[stream] = waited[row] = of_work.get(work, NONE)
        elif kind is RecordKind.WAIT_EVENT:
            waited[row] = of_event.get(event, NONE)
        elif kind is RecordKind.RECORD_EVENT:
            of_event[event] = last_of_stream.get(stream, NONE)
        elif kind is RecordKind.OP:
            last_of_stream[stream] = row if is_copy[row] else NONE
        elif kind is not RecordKind.HOST_SYNC:
            of_work[work] = row
    return waited


def copies_of(trace: Trace) -> NDArray[np.bool_]:
    """Return which records are copies between the memories of host and device [records]."""
    places = np.array([one.place in ("to_device", "to_host") for one in trace.signatures] + [False])
    return np.asarray(places[trace.records.signature])
