"""Columns of a timeline, from single spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.profiler.chrome_trace import StepLocation
from meshwright.spec.trace.timeline import Floats, SpanKind, Spans

TEXTS = ("names", "scopes", "phases", "actions", "axes")


class Span(NamedTuple):
    """One span with its texts."""

    rank: int
    stream: int
    start_ns: int
    end_ns: int
    kind: SpanKind
    name: str
    place: StepLocation
    axis: str | None = None
    num_bytes: int = 0


def spans_from(rows: Sequence[Span], origin_ns: int) -> tuple[Spans, dict[str, Any]]:
    """Return columns of `rows` sorted by start, in seconds since `origin_ns`, and the texts that they index."""
    rows = sorted(rows, key=lambda row: row.start_ns)
    texts: dict[str, dict[str, int]] = {kind: {} for kind in TEXTS}

    def column(kind: str, values: Sequence[str | None]) -> list[int]:
        seen = texts[kind]
        return [-1 if value is None else seen.setdefault(value, len(seen)) for value in values]

    def seconds(moments_ns: Sequence[int]) -> Floats:
        return np.asarray(np.array(moments_ns, np.int64) - origin_ns, np.float64) * 1e-9

    columns = {
        "rank": [row.rank for row in rows],
        "stream": [row.stream for row in rows],
        "kind": [int(row.kind) for row in rows],
        "name": column("names", [row.name for row in rows]),
        "scope": column("scopes", [row.place.scope for row in rows]),
        "phase": column("phases", [row.place.phase for row in rows]),
        "action": column("actions", [row.place.action or None for row in rows]),
        "axis": column("axes", [row.axis for row in rows]),
        "num_bytes": [row.num_bytes for row in rows],
        "record": [-1] * len(rows),
    }
    spans = Spans(
        start_s=seconds([row.start_ns for row in rows]),
        end_s=seconds([row.end_ns for row in rows]),
        **{name: np.array(values, np.int64) for name, values in columns.items()},
    )
    return spans, {kind: tuple(seen) for kind, seen in texts.items()}
