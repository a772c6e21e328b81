"""Chunks: a traced step cut into the actions of each microbatch and the work that the step does once.

    input    host-to-device copy of one microbatch, before the first action
    F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B    one action of the schedule
    wait     the host's wait for one message, after the last action
    frame    the rest, independent of the number of microbatches

Storages, works and events belong to the chunk that made them, and are identified in it by their order.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.spec.layout.schedule.action import parse_action
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.trace_order import in_order

INPUT, WAIT, FRAME = "input", "wait", "frame"
BEFORE = 0
"""The chunk of everything from before the step; it has no records."""


class NotExtrapolable(Exception):
    """The step cannot be extrapolated from a subset of its microbatches; the message says why."""


class ChunkKey(NamedTuple):
    """Identity of a chunk across microbatches."""

    kind: str
    stage: int
    """Position of the stage among those of its rank; of a frame its own number."""


@dataclass(frozen=True)
class TraceChunk:
    """Records from `start` to `stop`."""

    key: ChunkKey
    microbatch: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Producers:
    """For each storage, work or event of a trace the chunk that made it, and its position among those made there."""

    chunk: Ints
    ordinal: Ints
    count: Ints
    """Number of them that each chunk made [chunks]."""


@dataclass(frozen=True)
class CutTrace:
    """A trace and its chunks, the first of which is BEFORE."""

    trace: Trace
    chunks: list[TraceChunk]
    chunk_of_record: Ints
    storages: Producers
    works: Producers
    events: Producers

    def positions(self) -> dict[tuple[ChunkKey, int | None], int]:
        """Return the position of the chunk of each key and microbatch."""
        return {(chunk.key, chunk.microbatch): index for index, chunk in enumerate(self.chunks)}


def cut(trace: Trace, num_microbatches: int) -> CutTrace:
    """Return the trace, numbered by first appearance, in chunks; raises NotExtrapolable if they cannot be separated."""
    trace = in_order(trace)
    stages = sorted({parse_action(text).stage for text in trace.actions})
    chunks = [TraceChunk(ChunkKey("before", 0), None, 0, 0)]
    runs = _runs(trace.records.action)
    for index, (start, stop) in enumerate(runs):
        position = trace.records.action[start]
        if position != NONE:
            action = parse_action(trace.actions[position])
            chunks.append(TraceChunk(ChunkKey(action.kind, stages.index(action.stage)), action.microbatch, start, stop))
            continue
        length = _period(trace, stop, num_microbatches) if index == 0 else 0
        for microbatch in range(num_microbatches if length else 0):
            begin = microbatch * length
            chunks.append(TraceChunk(ChunkKey(INPUT, 0), microbatch, begin, begin + length))
        start += length * num_microbatches
        if index == len(runs) - 1:
            start = _add_waits(trace, chunks, start, stop)
        if start < stop:
            chunks.append(TraceChunk(ChunkKey(FRAME, index), None, start, stop))
    chunk_of_record = np.repeat(np.arange(len(chunks)), [chunk.stop - chunk.start for chunk in chunks])
    return CutTrace(
        trace,
        chunks,
        chunk_of_record,
        _made(np.append(chunk_of_record, BEFORE)[trace.storages.allocated_at], len(chunks)),
        _made_by(trace, chunk_of_record, "work", len(chunks)),
        _made_by(trace, chunk_of_record, "event", len(chunks)),
    )


def _runs(column: Ints) -> list[tuple[int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


def _period(trace: Trace, stop: int, times: int) -> int:
    """Return the length of the longest run of records that repeats `times` times at the beginning."""
    rows = np.stack([getattr(trace.records, name)[:stop] for name in ("kind", "stream", "signature", "scope")])
    for length in range(stop // times, 0, -1):
        runs = rows[:, : length * times].reshape(len(rows), times, length)
        if (runs == runs[:, :1]).all():
            return length
    return 0


def _add_waits(trace: Trace, chunks: list[TraceChunk], start: int, stop: int) -> int:
    """Add a chunk for each of the step's last waits for messages, and one for the records before; return their end."""
    sends = {
        work: chunk
        for chunk in chunks
        if chunk.key.kind.startswith("SEND")
        for work in trace.records.work[chunk.start : chunk.stop].tolist()
        if work != NONE
    }
    kinds, works = trace.records.kind[start:stop], trace.records.work[start:stop]
    is_wait = (kinds == RecordKind.WAIT) & np.isin(works, list(sends))
    found = np.flatnonzero(is_wait) + start
    if not len(found):
        return start
    if (np.diff(found) != 1).any():
        raise NotExtrapolable("the waits for messages are not consecutive")
    if found[0] > start:
        chunks.append(TraceChunk(ChunkKey(FRAME, -1), None, start, int(found[0])))
    for at in found.tolist():
        of = sends[trace.records.work[at]]
        chunks.append(TraceChunk(ChunkKey(f"{WAIT} {of.key.kind}", of.key.stage), of.microbatch, at, at + 1))
    return int(found[-1]) + 1


def _made_by(trace: Trace, chunk_of_record: Ints, name: str, num_chunks: int) -> Producers:
    """Return the producer of each work or event: the chunk of its first record, unless that is a wait."""
    column = getattr(trace.records, name)
    numbers, first = np.unique(column, return_index=True)
    first = first[numbers != NONE]
    waits = np.isin(trace.records.kind[first], (RecordKind.WAIT, RecordKind.WAIT_EVENT, RecordKind.HOST_SYNC))
    return _made(np.where(waits, BEFORE, chunk_of_record[first]), num_chunks)


def _made(chunk: Ints, num_chunks: int) -> Producers:
    """Return the producers, given the chunk of each item in order of creation."""
    count = np.bincount(chunk, minlength=num_chunks)
    order = np.argsort(chunk, kind="stable")
    first = np.cumsum(count) - count
    ordinal = np.empty(len(chunk), np.int64)
    ordinal[order] = np.arange(len(chunk)) - first[chunk[order]]
    return Producers(chunk.astype(np.int64), ordinal, count)
