"""Tables of a simulated step: seconds by kind and rank, the memory peak of each rank, and stragglers.

A communication op starts when the last of its ranks arrives, and then takes as long as in the nominal step: the
additional wait of a rank's default stream is time that it waits for other ranks.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from meshwright.simulator.analysis.exposure import text_at
from meshwright.simulator.checks.call_sites import without_numbers
from meshwright.simulator.engine.program import waited_records
from meshwright.simulator.memory.memory_curve import first_writers, live_at, roles_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.simulation_report import LiveTensors, RankMemory, RankTime, Stragglers, Straggling
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import MemoryCurve, SpanKind, TensorRole, Timeline
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_NUM_LARGEST = 8


def rank_times(timeline: Timeline, layout: Layout | None, traces: Traces | None = None) -> tuple[RankTime, ...]:
    """Return the time of each rank by part; its pipeline rank follows from `layout`, else from `traces`."""
    return tuple(
        RankTime(
            rank=rank,
            num_ranks=count,
            pipeline_rank=_pipeline_rank(rank, layout, traces),
            parts=decompose(timeline, rank),
        )
        for rank, count in zip(timeline.ranks, timeline.multiplicity, strict=True)
    )


def rank_memory(timeline: Timeline, traces: Traces, layout: Layout | None) -> tuple[RankMemory, ...]:
    """Return the memory peak of each rank that holds memory."""
    counts = dict(zip(timeline.ranks, timeline.multiplicity, strict=True))
    return tuple(
        _peak(curve, traces.of_rank(curve.rank), counts[curve.rank], _pipeline_rank(curve.rank, layout, traces))
        for curve in timeline.memory
        if len(curve.allocated_bytes)
    )


def _pipeline_rank(rank: int, layout: Layout | None, traces: Traces | None) -> int:
    """Return a rank's position in its pipeline: without a layout, in its group named pp, else 0."""
    if layout is not None:
        return rank // (layout.num_ranks // layout.pp)
    if traces is None:
        return 0
    trace = traces.of_rank(rank)
    rank = trace.traced.rank
    named = zip(trace.group_names, trace.groups, strict=True)
    stages = (ranks for name, ranks in named if name.partition(" (")[0] == "pp" and rank in ranks)
    return next((ranks.index(rank) for ranks in stages), 0)


def _peak(curve: MemoryCurve, trace: Trace, num_ranks: int, pipeline_rank: int) -> RankMemory:
    moment = int(curve.allocated_bytes.argmax())
    # NONE for an idle rank, which has no records.
    record = min(int(curve.record[moment]), len(trace.records) - 1)
    by_role = zip(TensorRole, curve.by_role[moment].tolist(), strict=True)
    return RankMemory(
        rank=curve.rank,
        num_ranks=num_ranks,
        pipeline_rank=pipeline_rank,
        allocated_bytes=int(curve.allocated_bytes.max()),
        reserved_bytes=int(curve.reserved_bytes.max()),
        by_role={role.name.lower(): num_bytes for role, num_bytes in by_role if num_bytes},
        at_s=float(curve.at_s[moment]),
        phase="" if record == NONE else text_at(trace.phases, trace.records.phase[record]),
        scope="" if record == NONE else text_at(trace.scopes, trace.records.scope[record]),
        op="" if record == NONE else _op(trace, record),
        largest=_largest(trace, record),
    )


def _largest(trace: Trace, record: int) -> tuple[LiveTensors, ...]:
    """Return the largest tensors when `record` runs, those of one line of the program together."""
    roles, rows = roles_of(trace), live_at(trace, record)
    makers = first_writers(trace)[rows].tolist()
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for row, maker in zip(rows.tolist(), makers, strict=True):
        scope = "" if maker == NONE else text_at(trace.scopes, trace.records.scope[maker])
        line = "" if maker == NONE else text_at(trace.lines, trace.records.line[maker])
        op = "before the step" if maker == NONE else _op(trace, maker)
        groups[TensorRole(int(roles[row])).name.lower(), op, without_numbers(scope), line].append(row)
    found = [
        LiveTensors(
            num_bytes=int(trace.storages.num_bytes[own].sum()),
            num_tensors=len(own),
            role=role,
            op=op,
            scope=scope,
            line=line,
        )
        for (role, op, scope, line), own in groups.items()
    ]
    return tuple(sorted(found, key=lambda live: -live.num_bytes)[:_NUM_LARGEST])


def _op(trace: Trace, record: int) -> str:
    signature = trace.records.signature[record]
    return trace.signatures[signature].op if signature != NONE else RecordKind(trace.records.kind[record]).name.lower()


_Waits = dict[tuple[str, str], tuple[float, int]]
"""By axis and operation: seconds and number of waits."""


def stragglers_of(timeline: Timeline, usual: Timeline, traces: Traces) -> Stragglers:
    """Return what `timeline` adds to the nominal (`usual`) step of the same traces."""
    counts = zip(timeline.ranks, timeline.multiplicity, strict=True)
    return Stragglers(
        usual_step_s=usual.step_s,
        ranks=tuple(_straggling(rank, count, timeline, usual, traces.traces[rank]) for rank, count in counts),
    )


def _straggling(rank: int, num_ranks: int, timeline: Timeline, usual: Timeline, trace: Trace) -> Straggling:
    now, before = (_waits(rank, one, trace) for one in (timeline, usual))
    added_s = {key: seconds - before.get(key, (0.0, 0))[0] for key, (seconds, _) in now.items()}
    computes_s, usual_s = (_computes_s(rank, one) for one in (timeline, usual))
    most = max(added_s, key=lambda key: added_s[key], default=None)
    where: dict[str, Any] = {}
    if most is not None and added_s[most] > 0:
        where = {"axis": most[0], "op": most[1], "op_wait_s": added_s[most], "count": now[most][1]}
    return Straggling(
        rank=rank,
        num_ranks=num_ranks,
        compute_s=computes_s,
        added_compute_s=computes_s - usual_s,
        added_wait_s=sum(added_s.values()),
        **where,
    )


def _computes_s(rank: int, timeline: Timeline) -> float:
    spans = timeline.of_rank(rank)
    is_own = (spans.kind == SpanKind.COMPUTE) & (spans.stream == 0)
    return float((spans.end_s - spans.start_s)[is_own].sum())


def _waits(rank: int, timeline: Timeline, trace: Trace) -> _Waits:
    spans, waited = timeline.of_rank(rank), waited_records(trace)
    rows = np.flatnonzero((spans.kind == SpanKind.WAIT) & (spans.stream == 0))
    found: _Waits = {}
    for row in rows[waited[spans.record[rows]] != NONE].tolist():
        axis = timeline.axes[spans.axis[row]] if spans.axis[row] >= 0 else ""
        signature = trace.records.signature[waited[spans.record[row]]]
        key = (axis, trace.signatures[signature].op)
        total_s, count = found.get(key, (0.0, 0))
        found[key] = total_s + float(spans.end_s[row] - spans.start_s[row]), count + 1
    return found
