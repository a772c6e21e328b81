"""timeline_of(): the spans of an execution; RecordIntervals: start and end of each record of one rank.

Each channel's communication ops are on a stream of their own, numbered after the device's, as communication libraries
use one stream per communicator. A wait is a span if it took any time, with the axis of the op that it waited for; a
wait for an event has the axis of the op for which the event's stream had last waited, or of its last copy to the host's
memory or back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.engine.engine import Execution, Host, Stream
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import copies_of, waited_records
from meshwright.spec.trace.timeline import DDP_MARK, FSDP_MARK, Floats, SpanKind, Spans, Timeline, TimelineSource
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_HOST_NAME = "host"
HOST_COPY = "host copy"
"""Axis of copies between host and device memory; those of FSDP2 count as fsdp."""
_SLOWDOWN = "slowdown of computing next to communication"
_KINDS = {
    RecordKind.OP: SpanKind.COMPUTE,
    RecordKind.COLLECTIVE: SpanKind.COMMUNICATION,
    RecordKind.SEND: SpanKind.COMMUNICATION,
    RecordKind.RECEIVE: SpanKind.COMMUNICATION,
    RecordKind.WAIT: SpanKind.WAIT,
    RecordKind.RECORD_EVENT: SpanKind.WAIT,
    RecordKind.WAIT_EVENT: SpanKind.WAIT,
    RecordKind.HOST_SYNC: SpanKind.HOST,
}


class StringTable:
    """Strings of all ranks, each once."""

    def __init__(self) -> None:
        self._positions: dict[Hashable, int] = {}

    def positions(self, texts: tuple[str, ...]) -> Ints:
        """Return the position of each string, and -1 at the end, for position -1."""
        return np.array([*(self._positions.setdefault(text, len(self._positions)) for text in texts), NONE], np.int64)

    def all(self) -> tuple[str, ...]:
        """Return every string."""
        return tuple(str(text) for text in self._positions)


@dataclass(frozen=True)
class StringTables:
    """The tables that columns of spans index."""

    names: StringTable
    scopes: StringTable
    phases: StringTable
    actions: StringTable
    axes: StringTable


def timeline_of(
    traces: Traces,
    comm_ops: CommOps,
    execution: Execution,
    when: Mapping[int, RecordIntervals],
    source: TimelineSource,
) -> Timeline:
    """Return the timeline of all representatives, spans of each in order of start, without memory."""
    tables = StringTables(*(StringTable() for _ in range(5)))
    parts = [_rank_spans(traces.traces[host.rank], comm_ops, when[host.rank], host, tables) for host in execution.hosts]
    ranks, counts = np.unique(traces.class_of_rank, return_counts=True)
    return Timeline(
        source=source,
        step_s=max(execution.end_s, *(float(part.end_s.max(initial=0.0)) for part in parts)),
        ranks=tuple(ranks.tolist()),
        multiplicity=tuple(counts.tolist()),
        names=tables.names.all(),
        scopes=tables.scopes.all(),
        phases=tables.phases.all(),
        actions=tables.actions.all(),
        axes=tables.axes.all(),
        spans=_joined(*parts),
    )


def _rank_spans(trace: Trace, comm_ops: CommOps, when: RecordIntervals, host: Host, tables: StringTables) -> Spans:
    records = trace.records
    kind = np.array([_KINDS[one] for one in RecordKind], np.int64)[records.kind]
    comm_op, signature = comm_ops.of_record[host.rank], records.signature.copy()
    waited = waited_records(trace, with_copies=True)
    signature[waited != NONE] = records.signature[waited[waited != NONE]]
    names = tuple(channel.axis for channel in comm_ops.channels)
    axes = tables.axes.positions(names)
    channel = np.where(comm_op == NONE, NONE, comm_ops.channel[comm_op] if len(comm_ops) else NONE)
    channel[waited != NONE] = channel[waited[waited != NONE]]
    axis = axes[channel]
    is_copy = copies_of(trace)
    kind[is_copy] = SpanKind.COMMUNICATION
    of_fsdp, of_ddp = (_in_scope(trace, mark) for mark in (FSDP_MARK, DDP_MARK))
    if of_ddp.any():
        # The name is for display only: DDP shares its channel with all other collectives of its group.
        named = tables.axes.positions(tuple(f"dp {name}".rstrip() if _is_nameless(name) else name for name in names))
        axis = np.where(of_ddp, named[channel], axis)
    of_copy = is_copy | ((waited != NONE) & is_copy[waited])
    copied_by_fsdp = np.where(waited != NONE, of_fsdp[waited], of_fsdp)
    for mask, name in ((of_copy & ~copied_by_fsdp, HOST_COPY), (of_copy & copied_by_fsdp, f"fsdp ({HOST_COPY})")):
        if mask.any():
            axis[mask] = tables.axes.positions((name,))[0]
    columns: dict[str, Any] = {
        "rank": np.full(len(records), host.rank, np.int64),
        "stream": when.stream,
        "start_s": when.start_s,
        "end_s": when.end_s,
        "kind": kind,
        "name": _named(trace, signature, tables),
        "scope": tables.scopes.positions(trace.scopes)[records.scope],
        "phase": tables.phases.positions(trace.phases)[records.phase],
        "action": tables.actions.positions(trace.actions)[records.action],
        "axis": axis,
        "num_bytes": np.where(is_copy, _written_bytes(trace)[records.signature], records.num_bytes),
        "record": np.arange(len(records)),
    }
    is_span = (when.end_s > when.start_s) & (records.kind != RecordKind.HOST_SYNC)
    rows = Spans(**columns)
    slowed = _slowed_spans(rows, when, axes[comm_ops.channel[[one.comm_op for one in when.slowed]]], tables)
    both = _joined(rows.take(is_span), _host_spans(rows, trace, host, tables), slowed)
    return both.take(np.argsort(both.start_s, kind="stable"))


def _in_scope(trace: Trace, mark: str) -> NDArray[np.bool_]:
    """Return which records are in a scope that begins with `mark` [records]."""
    return np.array([scope.startswith(mark) for scope in trace.scopes] + [False])[trace.records.scope]


def _is_nameless(axis: str) -> bool:
    """Return whether a group has no mesh axis, with or without a communicator of its own."""
    return not axis or axis.startswith("(")


def _written_bytes(trace: Trace) -> Ints:
    """Return the bytes that each signature writes, and 0 at the end, for position -1."""
    return np.array([*(one.written_bytes for one in trace.signatures), 0], np.int64)


def _slowed_spans(columns: Spans, when: RecordIntervals, axis: Ints, tables: StringTables) -> Spans:
    """Return the delays of the default stream from concurrent communication, as wait spans."""
    slowed = columns.take(np.array([one.record for one in when.slowed], np.int64))
    return replace(
        slowed,
        start_s=np.array([one.start_s for one in when.slowed]),
        end_s=np.array([one.end_s for one in when.slowed]),
        kind=np.full(len(when.slowed), SpanKind.WAIT, np.int64),
        name=np.full(len(when.slowed), tables.names.positions((_SLOWDOWN,))[0]),
        axis=axis,
        num_bytes=np.zeros(len(when.slowed), np.int64),
    )


def _named(trace: Trace, signature: Ints, tables: StringTables) -> Ints:
    of_signature = tables.names.positions(tuple(one.op for one in trace.signatures))
    of_kind = tables.names.positions(tuple(kind.name.lower().replace("_", " ") for kind in RecordKind))
    return np.where(signature == NONE, of_kind[trace.records.kind], of_signature[signature])


def _host_spans(columns: Spans, trace: Trace, host: Host, tables: StringTables) -> Spans:
    """Return the host's spans: one for each run of records of one module that it enqueued, and one for each stop."""
    enqueued_s = np.full(len(trace.records), np.nan)
    for one in host.streams:
        enqueued_s[one.records[: len(one.enqueued_at)]] = one.enqueued_at
    began_s = enqueued_s - host.host_s
    rows = np.flatnonzero((host.host_s > 0) & ~np.isnan(enqueued_s))
    keys = np.stack([columns.scope[rows], columns.phase[rows], columns.action[rows]])
    gap = np.abs(began_s[rows][1:] - enqueued_s[rows][:-1]) > 1e-12
    is_first = np.concatenate([[True], gap | (keys[:, 1:] != keys[:, :-1]).any(axis=0)])[: len(rows)]
    firsts, lasts = rows[is_first], rows[np.concatenate([is_first[1:], [True]])[: len(rows)].astype(bool)]
    issued = _at(columns, firsts, began_s[firsts], enqueued_s[lasts], tables)
    stops = np.array(host.stops).reshape(-1, 2)
    synced = np.array([record for record, _ in host.syncs[: len(stops)]], np.int64)
    is_long = stops[:, 1] > stops[:, 0]
    return _joined(issued, _at(columns, synced[is_long], stops[is_long, 0], stops[is_long, 1], tables))


def _at(columns: Spans, rows: Ints, start_s: Floats, end_s: Floats, tables: StringTables) -> Spans:
    """Return host spans with the scope, phase and action of these records."""
    one = columns.take(rows)
    same = {name: getattr(one, name) for name in ("rank", "scope", "phase", "action", "record")}
    empty = np.full(len(rows), NONE, np.int64)
    name = tables.names.positions((_HOST_NAME,))[0]
    return Spans(
        stream=empty,
        start_s=start_s,
        end_s=end_s,
        kind=np.full(len(rows), SpanKind.HOST, np.int64),
        name=np.full(len(rows), name, np.int64),
        axis=empty,
        num_bytes=np.zeros(len(rows), np.int64),
        **same,
    )


def _joined(*parts: Spans) -> Spans:
    return Spans(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Spans)}
    )


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
