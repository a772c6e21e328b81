"""stragglers_of(): which ranks are slower than in the nominal step, which wait longer for others, and where.

A communication op starts when the last of its ranks arrives, and then takes as long as in the nominal step: the
additional wait of a rank's default stream is time that it waits for other ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.simulator.engine.program import waited_records
from meshwright.spec.step.dry_run import Stragglers, Straggling
from meshwright.spec.trace.timeline import SpanKind, Timeline
from meshwright.spec.trace.trace import NONE, Trace
from meshwright.spec.trace.traces import Traces

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
