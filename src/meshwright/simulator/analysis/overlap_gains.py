"""overlap_of(): exposed communication of a simulated step, and the computation that could hide it, op by op.

    exposed   seconds of a communication op during which no stream of the rank computes
    earlier   computation between the last write to its inputs and its start, at most as exposed
    later     computation between its end and the first use of its outputs, at most as exposed
    gain      earlier + later, at most as exposed

FSDP2 copies its shards into a buffer before it gathers them: the op is ready as soon as the parameters are. Ignored:
shared links, longer-lived memory, and that the gain of one op may become the wait of another. suggestions() has the
changes of a job's keys, or of a program, that would hide most.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.simulator.analysis.exposure import busy_seconds
from meshwright.simulator.checks.call_sites import COMMUNICATION, without_numbers
from meshwright.spec.frozen import Frozen
from meshwright.spec.trace.timeline import DDP_MARK, SpanKind, Timeline
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.units import format_duration

FSDP_GATHER, FSDP_REDUCE = "FSDP::all_gather", "FSDP::post_backward"
"""Prefixes of the scopes of FSDP2's collectives."""
_KEYS_OF_AXIS = {
    "tp": ("layout.async_tp", "layout.tp"),
    "cp": ("layout.cp_method", "layout.cp"),
    "pp": ("layout.schedule", "layout.microbatch_size"),
    "ep": ("layout.microbatch_size", "layout.ep"),
}


class _Place(NamedTuple):
    """The fields by which communication ops are grouped."""

    axis: str
    op: str
    phase: str
    scope: str
    is_async: bool
    keys: tuple[str, ...]


def overlap_of(trace: Trace, timeline: Timeline) -> Overlap:
    """Return the exposed communication of a rank in the simulated step of its trace, by kind and place."""
    moments = _Dependencies(trace, timeline)
    found: dict[_Place, list[tuple[float, ...]]] = defaultdict(list)
    total_s = 0.0
    for record in np.flatnonzero(np.isin(trace.records.kind, COMMUNICATION)).tolist():
        start_s, end_s = moments.start_s[record], moments.end_s[record]
        if not start_s < end_s:
            continue
        total_s += end_s - start_s
        exposed_s = end_s - start_s - moments.computed_s(start_s, end_s)
        if exposed_s > 0:
            earlier_s = min(exposed_s, moments.computed_s(min(moments.ready_s(record), start_s), start_s))
            later_s = min(exposed_s, moments.computed_s(end_s, max(moments.needed_s(record), end_s)))
            found[_place(trace, record)].append((exposed_s, earlier_s, later_s, min(exposed_s, earlier_s + later_s)))
    exposed = [
        Exposed(**place._asdict(), count=len(rows), **_sums(rows))  # type: ignore[arg-type]
        for place, rows in found.items()
    ]
    return Overlap(
        rank=trace.traced.rank,
        communication_s=total_s,
        exposed_s=sum(one.exposed_s for one in exposed),
        exposed=tuple(sorted(exposed, key=lambda one: (-one.gain_s, -one.exposed_s))),
    )


class _Dependencies:
    """Intervals of one rank's records, and their data dependencies."""

    def __init__(self, trace: Trace, timeline: Timeline) -> None:
        self.trace = trace
        spans = timeline.of_rank(trace.traced.rank)
        runs = np.isin(spans.kind, (SpanKind.COMPUTE, SpanKind.COMMUNICATION)) & (spans.record != NONE)
        self.start_s, self.end_s = (np.full(len(trace.records), np.nan) for _ in range(2))
        self.start_s[spans.record[runs]], self.end_s[spans.record[runs]] = spans.start_s[runs], spans.end_s[runs]
        computes = spans.take(spans.kind == SpanKind.COMPUTE)
        self._edges, self._computed = busy_seconds(computes)
        uses = trace.uses
        self._of_record = np.searchsorted(uses.record, np.arange(len(trace.records) + 1))
        order = np.argsort(uses.storage, kind="stable")
        self._record, self._writes = uses.record[order], uses.writes[order]
        self._of_storage = np.searchsorted(uses.storage[order], np.arange(len(trace.storages) + 1))
        stages = [scope.startswith(FSDP_GATHER) for scope in trace.scopes]
        self._is_staging = np.array([*stages, False])[trace.records.scope] & (trace.records.kind == RecordKind.OP)

    def computed_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds between two times during which the rank computes."""
        first, last = np.interp([start_s, end_s], self._edges, self._computed)
        return float(last - first)

    def ready_s(self, record: int) -> float:
        """Return when the inputs of a communication op are written; 0 if they are from before the step."""
        writers = [self._last_writer(storage, record) for storage in self._storages(record)]
        # A buffer into which FSDP2 copies shards is ready when the shards are.
        through = [
            self._last_writer(storage, writer)
            for writer in writers
            if writer != NONE and self._is_staging[writer]
            for storage in self._storages(writer)
        ]
        own = [writer for writer in writers if writer != NONE and not self._is_staging[writer]]
        ends = self.end_s[[one for one in (*own, *through) if one != NONE and not self._is_staging[one]]]
        return float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0

    def needed_s(self, record: int) -> float:
        """Return when the outputs of a communication op are first used; its own end if never."""
        starts = []
        for storage in self._storages(record):
            records = self._record[self._of_storage[storage] : self._of_storage[storage + 1]]
            later = records[records > record]
            starts += [self.start_s[later[0]]] if len(later) else []
        return float(np.nanmin(starts)) if np.isfinite(starts).any() else float(self.end_s[record])

    def _storages(self, record: int) -> list[int]:
        uses = slice(self._of_record[record], self._of_record[record + 1])
        return sorted(set(self.trace.uses.storage[uses].tolist()))

    def _last_writer(self, storage: int, before: int) -> int:
        """Return the last record before `before` that wrote to a storage; -1 for none."""
        part = slice(self._of_storage[storage], self._of_storage[storage + 1])
        records = self._record[part][(self._writes[part] == 1) & (self._record[part] < before)]
        return int(records[-1]) if len(records) else NONE


def _place(trace: Trace, record: int) -> _Place:
    """Return the axis, operation, phase and scope of a record, and the keys of a job that affect it."""
    records = trace.records
    group, signature, scope = records.group[record], records.signature[record], trace.scopes[records.scope[record]]
    axis = "" if group == NONE else trace.group_names[group]
    phase = trace.phases[records.phase[record]]
    op = "" if signature == NONE else trace.signatures[signature].op
    return _Place(axis, op, phase, without_numbers(scope), _is_async(trace, record), _keys(axis, scope, phase))


def _is_async(trace: Trace, record: int) -> bool:
    """Return whether there are other records between a communication op and its wait."""
    records, after = trace.records, record + 1
    is_wait = after < len(records) and records.kind[after] == RecordKind.WAIT
    return not (is_wait and records.work[after] == records.work[record])


def _keys(axis: str, scope: str, phase: str) -> tuple[str, ...]:
    if scope.startswith(FSDP_GATHER):
        return ("layout.prefetch", "layout.reshard_after_forward") if phase == "backward" else ("layout.prefetch",)
    if scope.startswith(FSDP_REDUCE):
        return ("layout.microbatch_size", "layout.dp_shard")
    return _KEYS_OF_AXIS.get(axis, ())


def _sums(rows: list[tuple[float, ...]]) -> dict[str, float]:
    names = ("exposed_s", "earlier_s", "later_s", "gain_s")
    return {name: float(total) for name, total in zip(names, np.sum(rows, axis=0), strict=True)}


_MOST = 3
_LEAST_GAIN = 0.002
"""Share of the step below which a gain is not reported."""
_LEAST_PART = 0.1
"""Share of the gain below which an earlier start or a later wait is not suggested."""


def suggestions(overlap: Overlap, step_s: float, *, is_job: bool) -> tuple[str, ...]:
    """Return the changes that would hide most of a rank's communication, largest gain first."""
    worth = [(one, _change(one, is_job)) for one in overlap.exposed if one.gain_s >= _LEAST_GAIN * step_s]
    return tuple(f"rank {overlap.rank}: {_words(one)}: {change}" for one, change in worth if change)[:_MOST]


def _words(one: Exposed) -> str:
    place = ", ".join(part for part in (one.axis, one.phase, one.scope or "outside of modules") if part)
    return f"up to {format_duration(one.gain_s)} of {one.op} ({place}) could hide behind computation"


def _change(one: Exposed, is_job: bool) -> str:
    return ", ".join(one.keys) if is_job else _change_of_program(one)


def _change_of_program(one: Exposed) -> str:
    if one.scope.startswith(FSDP_GATHER):
        if one.phase == "backward":
            return "set_modules_to_backward_prefetch(), or fully_shard(..., reshard_after_forward=False)"
        return "set_modules_to_forward_prefetch()"
    if one.scope.startswith(FSDP_REDUCE):
        if "allreduce" in one.op:
            return "more tokens in each backward"
        return "more tokens in each backward, or fully_shard() over fewer ranks (a mesh with a replicated dimension)"
    if one.scope.startswith(DDP_MARK):
        return "more tokens in each backward, or a smaller bucket_cap_mb"
    if one.axis.startswith("pp"):
        return "more microbatches, or another schedule"
    return _how_to_begin_async(one) + " and ".join(_changes_of_order(one))


def _how_to_begin_async(one: Exposed) -> str:
    """Return how to make the call asynchronous; "" if it is."""
    if one.is_async or not one.op.startswith("c10d."):
        return ""
    return "with isend() or irecv(), " if _is_message(one) else "with async_op=True, "


def _changes_of_order(one: Exposed) -> list[str]:
    least_s = _LEAST_PART * one.gain_s
    ready = "its buffer is free" if one.op.startswith("c10d.recv") else "its input is written"
    earlier = [f"start it as soon as {ready}"] if one.earlier_s > least_s else []
    later = ["call wait() where its result is first used"] if one.later_s > least_s else []
    return earlier + later


def _is_message(one: Exposed) -> bool:
    return one.op.startswith(("c10d.send", "c10d.recv"))


class Exposed(Frozen):
    """Collectives or messages of one kind, in one place of the model, that a rank waits for."""

    axis: str
    """The mesh axis; "" for groups without a name."""
    op: str
    phase: str
    scope: str
    """The module in whose code they are, with * for numbers; "" outside of modules."""
    count: PositiveInt
    exposed_s: NonNegativeFloat
    """While the rank computes nothing."""
    earlier_s: NonNegativeFloat
    """Of it, what computation before could hide if they started as soon as their inputs are complete."""
    later_s: NonNegativeFloat
    """Of it, what later computation could hide if their wait came just before the first use of their outputs."""
    gain_s: NonNegativeFloat
    """What both would save, if nothing else waited instead."""
    is_async: bool = False
    """Whether the program already does something else before it waits for them."""
    keys: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of a job that change when they begin, or how long they take."""


class Overlap(Frozen):
    """What one rank's communication waits for."""

    rank: NonNegativeInt
    communication_s: NonNegativeFloat
    exposed_s: NonNegativeFloat
    exposed: Annotated[tuple[Exposed, ...], Field(strict=False)] = ()
    """The most gain first."""
