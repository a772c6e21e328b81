"""A timeline is what it was before it was written."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from meshwright.spec.trace.timeline import MemoryCurve, SpanKind, Spans, TensorRole, Timeline, TimelineSource


def a_timeline() -> Timeline:
    """Two ranks: each computes, rank 1 sends to nobody else."""
    rows = {
        "rank": [0, 1, 1],
        "start_s": [0.0, 0.0, 0.5],
        "end_s": [1.0, 0.5, 1.25],
        "kind": [SpanKind.COMPUTE, SpanKind.COMPUTE, SpanKind.COMMUNICATION],
        "axis": [-1, -1, 0],
    }
    columns = {
        field.name: np.array(rows.get(field.name, [0, 0, 0]), float if field.name.endswith("_s") else np.int64)
        for field in fields(Spans)
    }
    curve = MemoryCurve(
        rank=1,
        at_s=np.array([0.0, 1.0]),
        by_role=np.ones((2, len(TensorRole)), np.int64),
        allocated_bytes=np.array([512, 1024]),
        reserved_bytes=np.array([2048, 2048]),
        record=np.array([0, 3]),
    )
    return Timeline(
        source=TimelineSource(kind="simulated", name="a job", world_size=2, cluster="h100-ib400:2"),
        step_s=1.25,
        ranks=(0, 1),
        multiplicity=(1, 1),
        names=("aten.mm.default",),
        scopes=("blocks.0",),
        phases=("forward",),
        actions=("0F0",),
        axes=("tp",),
        spans=Spans(**columns),
        memory=(curve,),
    )


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    timeline = a_timeline()
    timeline.save(tmp_path / "timeline.npz")
    read = Timeline.load(tmp_path / "timeline.npz")
    for field in fields(Timeline):
        if field.name not in ("spans", "memory"):
            assert getattr(read, field.name) == getattr(timeline, field.name)
    for name, column in vars(timeline.spans).items():
        assert (getattr(read.spans, name) == column).all()
    for name, column in vars(timeline.memory[0]).items():
        assert np.array_equal(getattr(read.memory[0], name), column)


def test_a_timeline_of_before_the_field_was_renamed_is_read(tmp_path: Path) -> None:
    file, timeline = tmp_path / "timeline.npz", a_timeline()
    timeline.save(file)
    with np.load(file) as arrays:
        columns = dict(arrays)
    columns["about"] = np.array(str(columns["about"]).replace('"multiplicity"', '"stands_for"'))
    np.savez_compressed(file, **columns)
    assert Timeline.load(file).multiplicity == timeline.multiplicity


def test_the_spans_of_one_rank() -> None:
    assert a_timeline().of_rank(1).end_s.tolist() == [0.5, 1.25]
