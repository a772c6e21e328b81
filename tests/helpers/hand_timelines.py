"""Timelines written by hand, span by span, for tests of what reads timelines."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from meshwright.spec.trace.timeline import SpanKind, Spans, Timeline, TimelineSource

AXES = ("tp", "fsdp", "pp", "world")
PHASES = ("forward", "recompute", "optimizer")


def timeline_of(rows: list[dict[str, float]], step_s: float, multiplicity: tuple[int, ...] = (1,)) -> Timeline:
    """A timeline of the given spans; what a row leaves out is rank 0, stream 0, and nothing."""
    default = {"rank": 0, "stream": 0, "phase": 0}
    columns = {
        field.name: np.array(
            [row.get(field.name, default.get(field.name, -1)) for row in rows],
            float if field.name.endswith("_s") else np.int64,
        )
        for field in fields(Spans)
    }
    return Timeline(
        source=TimelineSource(kind="simulated", name="by hand", world_size=sum(multiplicity)),
        step_s=step_s,
        ranks=tuple(range(len(multiplicity))),
        multiplicity=multiplicity,
        names=(),
        scopes=(),
        phases=PHASES,
        actions=(),
        axes=AXES,
        spans=Spans(**columns),
    )


def span(kind: SpanKind, start_s: float, end_s: float, **columns: float) -> dict[str, float]:
    return {"kind": kind, "start_s": start_s, "end_s": end_s, **columns}


def of_axis(name: str) -> dict[str, float]:
    return {"axis": AXES.index(name)}
