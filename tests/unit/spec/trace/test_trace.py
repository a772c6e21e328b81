"""A trace is what it was before it was written, and tells what is live when."""

from pathlib import Path

import numpy as np

from meshwright.spec.trace.trace import (
    NONE,
    RecordKind,
    Records,
    Signature,
    Storages,
    TensorShape,
    Trace,
    Traced,
    Uses,
)


def a_trace() -> Trace:
    """Three records: a product, a collective, and a wait for it; four storages."""
    shape = TensorShape(dtype="bfloat16", dims=(2, 3))
    none = [NONE] * 3
    columns = {
        "kind": [RecordKind.OP, RecordKind.COLLECTIVE, RecordKind.WAIT],
        "stream": [0, 1, 0],
        "signature": [0, 1, NONE],
        "scope": [0, 0, 1],
        "phase": [0, 0, 0],
        "action": [0, 0, NONE],
        "group": [NONE, 0, NONE],
        "peer": none,
        "num_bytes": [0, 96, 0],
        "work": [NONE, 0, 0],
        "event": none,
        "line": [NONE, 0, 1],
    }
    storages = {"num_bytes": [100, 10, 20, 7], "allocated_at": [-1, 0, 1, 1], "freed_at": [-1, 2, -1, 1]}
    uses = {"record": [0, 0, 1], "storage": [0, 1, 2], "writes": [0, 1, 1]}
    return Trace(
        traced=Traced(build="module:function", rank=3, world_size=16_384, torch_version="2.13.0"),
        signatures=(
            Signature(op="aten.mm.default", inputs=(shape, shape), outputs=(shape,), flops=36),
            Signature(op="c10d.allreduce_.default", inputs=(shape,), outputs=()),
        ),
        scopes=("", "blocks.0"),
        phases=("forward",),
        actions=("2F0",),
        groups=((0, 8, 16),),
        group_names=("fsdp",),
        lines=("train.py:40", "model.py:7"),
        records=Records(**{name: np.array(values, np.int64) for name, values in columns.items()}),
        storages=Storages(
            **{name: np.array(values, np.int64) for name, values in (*storages.items(), ("stream", [0] * 4))}
        ),
        uses=Uses(**{name: np.array(values, np.int64) for name, values in uses.items()}),
    )


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = a_trace()
    trace.save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    for name in ("traced", "signatures", "scopes", "phases", "actions", "groups", "group_names", "lines"):
        assert getattr(read, name) == getattr(trace, name)
    for table in ("records", "storages", "uses"):
        for name, column in vars(getattr(trace, table)).items():
            assert (getattr(getattr(read, table), name) == column).all()


def test_what_is_live_before_each_record_and_after_the_last() -> None:
    # 100 throughout, 10 from before the first until before the third, 20 from before the second; 7 come and go there.
    assert a_trace().live_bytes().tolist() == [110, 130, 120, 120]
