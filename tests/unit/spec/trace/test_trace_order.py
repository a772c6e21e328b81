"""Two ranks do the same whatever their works, events, storages and groups are called, and what differs is found."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from meshwright.spec.trace.trace import NONE, RecordKind, Records, Signature, Storages, TensorShape, Trace, Traced, Uses
from meshwright.spec.trace.trace_order import fingerprint, first_difference, in_order


def a_trace(work: int = 0, event: int = 0, ranks: tuple[int, ...] = (0, 8)) -> Trace:
    """An operation, a collective on another stream, the wait for it, and an event; one storage passes through."""
    shape = TensorShape(dtype="bfloat16", dims=(2, 3))
    columns = {
        "kind": [RecordKind.OP, RecordKind.COLLECTIVE, RecordKind.WAIT, RecordKind.RECORD_EVENT],
        "stream": [0, 1, 0, 0],
        "signature": [0, 1, NONE, NONE],
        "scope": [0] * 4,
        "phase": [0] * 4,
        "action": [NONE] * 4,
        "group": [NONE, 0, NONE, NONE],
        "peer": [NONE] * 4,
        "num_bytes": [0, 12, 0, 0],
        "work": [NONE, work, work, NONE],
        "event": [NONE, NONE, NONE, event],
        "line": [NONE] * 4,
    }
    storages = {"num_bytes": [100, 12], "allocated_at": [-1, 0], "freed_at": [-1, 3], "stream": [0, 0]}
    uses = {"record": [0, 0, 1], "storage": [0, 1, 1], "writes": [0, 1, 1]}
    return Trace(
        traced=Traced(build="module:function", rank=0, world_size=16, torch_version="2.13.0"),
        signatures=tuple(
            Signature(op=op, inputs=(shape,), outputs=(shape,)) for op in ("aten.relu.default", "c10d.allreduce_")
        ),
        scopes=("blocks.0",),
        phases=("forward",),
        actions=(),
        groups=(ranks,),
        group_names=("fsdp",),
        records=Records(**{name: np.array(values, np.int64) for name, values in columns.items()}),
        storages=Storages(**{name: np.array(values, np.int64) for name, values in storages.items()}),
        uses=Uses(**{name: np.array(values, np.int64) for name, values in uses.items()}),
    )


def test_numbers_and_ranks_do_not_count() -> None:
    other = a_trace(work=7, event=30, ranks=(3, 11))
    other = replace(
        other,
        storages=Storages(**{name: column[::-1] for name, column in vars(other.storages).items()}),
        uses=replace(other.uses, storage=1 - other.uses.storage),
    )
    assert first_difference(a_trace(), other) is None
    assert fingerprint(a_trace()) == fingerprint(other)
    assert in_order(other).storages.num_bytes.tolist() == [100, 12]
    assert in_order(other).records.work.tolist() == [NONE, 0, 0, NONE]


def changed(name: str, at: int, value: int) -> Callable[[Trace], Trace]:
    def change(trace: Trace) -> Trace:
        part, _, column = name.partition(".")
        getattr(getattr(trace, part), column)[at] = value
        return trace

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("records.stream", 1, 0), r"record 1 is c10d.allreduce_\(bfloat16\[2, 3\]\) in blocks.0 on the one"),
        (changed("records.num_bytes", 1, 16), "record 1 is"),
        (changed("records.kind", 3, RecordKind.WAIT_EVENT), "record event in blocks.0 on the one and wait event"),
        (changed("storages.num_bytes", 1, 16), "storages.num_bytes differs first at 1"),
        (changed("storages.freed_at", 1, 2), "storages.freed_at differs first at 1"),
        (changed("uses.writes", 2, 0), "uses.writes differs first at 2"),
        (lambda trace: replace(trace, groups=((0, 1, 2),)), "their groups differ"),
        (lambda trace: replace(trace, signatures=trace.signatures[::-1]), "record 0 is aten.relu.default"),
    ],
)
def test_what_differs_first_is_told(change: Callable[[Trace], Trace], message: str) -> None:
    other = change(a_trace())
    assert fingerprint(other) != fingerprint(a_trace())
    found = first_difference(a_trace(), other)
    assert found is not None
    assert message.replace("\\", "") in found
