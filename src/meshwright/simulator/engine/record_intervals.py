"""RecordIntervals: start and end of each record of one rank, from an execution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.simulator.engine.engine import Execution, Host, Stream
from meshwright.simulator.engine.matching import CommOps
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace


@dataclass(frozen=True)
class RecordIntervals:
    """Start and end of each record of one rank; nan for records that never ran or take no time [records]."""

    start_s: Floats
    end_s: Floats
    stream: Ints
    slowed: tuple[Slowed, ...] = ()


class Slowed(NamedTuple):
    """A delay of the default stream after a record, from concurrent communication."""

    record: int
    start_s: float
    end_s: float
    comm_op: int


def intervals_of(trace: Trace, comm_ops: CommOps, execution: Execution, host: Host) -> RecordIntervals:
    """Return the intervals of one rank's records."""
    start_s, end_s = np.full((2, len(trace.records)), np.nan)
    stream = trace.records.stream.copy()
    for one in host.streams:
        _set_stream(one, trace, start_s, end_s, stream)
    comm_op = comm_ops.of_record[host.rank]
    rows = np.flatnonzero(comm_op != NONE)
    began_at, ended_at = execution.times_of(host.rank)
    ended = ended_at[comm_op[rows]] >= 0
    start_s[rows] = np.where(ended, began_at[comm_op[rows]], np.nan)
    end_s[rows] = np.where(ended, ended_at[comm_op[rows]], np.nan)
    _, channel = np.unique(comm_ops.channel[comm_op[rows]], return_inverse=True)
    stream[rows] = 1 + int(trace.records.stream.max(initial=0)) + channel.ravel()
    return RecordIntervals(start_s, end_s, stream, tuple(one for each in host.streams for one in _slowed(each)))


def _set_stream(one: Stream, trace: Trace, start_s: Floats, end_s: Floats, stream: Ints) -> None:
    """Fill in the records of one stream."""
    num_started = len(one.started_at)
    rows = one.records[:num_started]
    at_s, enqueued_s = np.array(one.started_at), np.array(one.enqueued_at[:num_started])
    after_s = at_s + np.array(one.seconds[:num_started])
    late_s = np.zeros(num_started)
    late_s[list(one.late_s)] = list(one.late_s.values())
    free_s = np.concatenate([[0.0], (after_s + late_s)[:-1]])[:num_started]
    is_op = trace.records.kind[rows] == RecordKind.OP
    # A wait starts when the stream reaches it.
    start_s[rows] = np.where(is_op, at_s, np.maximum(free_s, enqueued_s))
    end_s[rows] = np.where(is_op, after_s, at_s)
    stream[rows] = one.number


def _slowed(one: Stream) -> Iterator[Slowed]:
    for place, late_s in one.late_s.items():
        start_s = one.started_at[place] + one.seconds[place]
        yield Slowed(int(one.records[place]), start_s, start_s + late_s, one.slowed_by[place])
