"""Program: what one rank plays, as its trace says, made ready for the engine: streams, and the host that feeds them.

Four instructions are left of all kinds of records: RUN for some seconds, WAIT for a signal, MARK one, MEET the others.
A signal is a moment that something waits for: the end of a comm op, an event, a place that the host waits for. Where
the host itself computes (Device.is_host) there is one stream, which the host's own seconds are part of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Records, Trace


class Instruction(IntEnum):
    """What a stream does with a record."""

    RUN = 0
    """Takes its seconds; 0 of what the device does not notice."""
    WAIT = 1
    """Goes on once its signal is there."""
    MARK = 2
    """Gives its signal."""
    MEET = 3
    """Hands its communication op to the communication library, and goes on."""


_INSTRUCTION_OF = {
    RecordKind.OP: Instruction.RUN,
    RecordKind.COLLECTIVE: Instruction.MEET,
    RecordKind.SEND: Instruction.MEET,
    RecordKind.RECEIVE: Instruction.MEET,
    RecordKind.WAIT: Instruction.WAIT,
    RecordKind.RECORD_EVENT: Instruction.MARK,
    RecordKind.WAIT_EVENT: Instruction.WAIT,
    RecordKind.HOST_SYNC: Instruction.MARK,
}

# An enumeration's members are slow to look up.
_WAIT, _RECORD_EVENT, _WAIT_EVENT, _HOST_SYNC = (
    int(kind) for kind in (RecordKind.WAIT, RecordKind.RECORD_EVENT, RecordKind.WAIT_EVENT, RecordKind.HOST_SYNC)
)


@dataclass(frozen=True)
class RecordTimes:
    """What the records of one rank take; one element a record."""

    device_s: Floats
    """That an operation takes on its stream; 0 of other records."""
    host_s: Floats
    """That the host takes before the record is handed to its stream."""


@dataclass(frozen=True)
class Program:
    """One rank's step; one element a record unless said otherwise."""

    rank: int
    stream: Ints
    instruction: Ints
    signal: Ints
    """Of waits and marks; the communication op's number of a MEET, whose end is the signal of the same number."""
    times: RecordTimes
    syncs: tuple[tuple[int, int], ...]
    """Records after which the host stops, and the signals that it then waits for."""
    num_handed: int
    """Records that the host hands over before it is gone: all, unless a fault stops it."""

    def failing(self, stops_at: int | None, dropped: Ints) -> Program:
        """Return what is left of it where the host stops before a record, and some messages are never sent."""
        instruction = self.instruction.copy()
        instruction[dropped] = Instruction.RUN
        num_handed = self.num_handed if stops_at is None else stops_at
        return replace(self, instruction=instruction, num_handed=num_handed)


class Signals:
    """Gives out numbers of signals: those of communication ops, then one that was always there, then any."""

    def __init__(self, num_comm_ops: int) -> None:
        self.always = num_comm_ops
        self.count = num_comm_ops + 1

    def take(self, number: int) -> Ints:
        """Return `number` new ones."""
        self.count += number
        return np.arange(self.count - number, self.count)


def program_of(trace: Trace, comm_op: Ints, times: RecordTimes, signals: Signals, *, is_host: bool) -> Program:
    """Return what the trace's rank plays, given the communication op that each record is part in, and times."""
    records = trace.records
    table = np.array([_INSTRUCTION_OF[kind] for kind in RecordKind])
    instruction = table[records.kind]
    signal = np.full(len(records), signals.always, np.int64)
    meets = instruction == Instruction.MEET
    signal[meets] = comm_op[meets]
    marks = instruction == Instruction.MARK
    signal[marks] = signals.take(int(marks.sum()))
    syncs = _set_waits(records, signal)
    return Program(
        rank=trace.traced.rank,
        stream=np.zeros_like(records.stream) if is_host else records.stream,
        instruction=instruction,
        signal=signal,
        times=RecordTimes(times.device_s + times.host_s, np.zeros(len(records))) if is_host else times,
        syncs=() if is_host else tuple(syncs),
        num_handed=len(records),
    )


def _set_waits(records: Records, signal: Ints) -> list[tuple[int, int]]:
    """Give waits the signals that they are for; what was asked for before the step was always there.

    Returns where the host stops, and for what: its stream's own place, or an event that it names.
    """
    of_work: dict[int, int] = {}
    of_event: dict[int, int] = {}
    syncs = []
    rows = np.flatnonzero(records.kind != RecordKind.OP)
    columns = (rows, records.kind[rows], records.work[rows], records.event[rows], signal[rows])
    for row, kind, work, event, own in zip(*(column.tolist() for column in columns), strict=True):
        if kind == _RECORD_EVENT:
            of_event[event] = own
        elif kind == _WAIT_EVENT:
            signal[row] = of_event.get(event, own)
        elif kind == _WAIT:
            signal[row] = of_work.get(work, own)
        elif kind != _HOST_SYNC:
            of_work[work] = own
        elif event == NONE or event in of_event:
            syncs.append((row, of_event.get(event, own)))
    return syncs
