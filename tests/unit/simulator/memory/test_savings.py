"""Recompute and offload candidates at a rank's peak, tensors of one line of the program together."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.simulator.memory.live_at_peak import liveness_of, savings_of
from meshwright.spec.step.liveness import SavedTensors
from meshwright.spec.trace.trace import RecordKind
from written_steps import WrittenStep

MATMUL, SILU, EMPTY, TINY = "aten.mm.default", "aten.silu.default", "aten.empty.memory_format", "aten.zeros.default"
SECONDS = {MATMUL: 1.0, SILU: 0.25, EMPTY: 0.0, "c10d.recv_.default": 0.0, TINY: 0.0}
HOST_BYTES_PER_S = 1000.0


def network_step() -> WrittenStep:
    """Return two blocks that each keep a matmul's result, something elementwise of it, and what a rank sent them."""
    step = WrittenStep()
    weight, kept = step.there(640), list[int]()
    for block in range(2):
        step.scope = f"blocks.{block}.ffn"
        wide = step.make(400, reads=(weight,), op=MATMUL)
        received = step.make(200, op=EMPTY)
        step.op(kind=int(RecordKind.RECEIVE), reads=(received,), writes=(received,), op="c10d.recv_.default")
        kept += [wide, step.make(200, reads=(wide,), op=SILU), received]
    step.scope = ""
    kept.append(step.make(8, op=TINY))
    step.phase = "backward"
    step.op(reads=(*kept, weight))
    step.free(*kept)
    step.op()
    return step


def found(*, can_offload: bool) -> dict[str, SavedTensors]:
    trace = network_step().trace()
    live = liveness_of(trace, np.array([SECONDS[one.op] for one in trace.signatures]), HOST_BYTES_PER_S)
    return {saved.op: saved for saved in savings_of(live, can_offload=can_offload)}


def test_lines_of_all_blocks_come_together_best_first() -> None:
    saved = found(can_offload=True)
    assert next(iter(saved)) == SILU
    assert {one.scope for one in saved.values()} == {"blocks.*.ffn"}
    assert {op: (one.num_bytes, one.num_tensors) for op, one in saved.items()} == {
        SILU: (400, 2),
        EMPTY: (400, 2),
        MATMUL: (800, 2),
    }
    assert (saved[SILU].recompute_s, saved[MATMUL].recompute_s) == (pytest.approx(0.5), pytest.approx(2.0))
    assert (saved[SILU].offload_s, saved[MATMUL].offload_s) == (pytest.approx(0.8), pytest.approx(1.6))


def test_what_another_rank_sent_is_only_moved() -> None:
    assert found(can_offload=True)[EMPTY].recompute_s is None
    assert EMPTY not in found(can_offload=False)


def test_a_host_moves_nothing_to_itself() -> None:
    assert {op: one.offload_s for op, one in found(can_offload=False).items()} == {SILU: None, MATMUL: None}
