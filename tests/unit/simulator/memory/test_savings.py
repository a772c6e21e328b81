"""Recompute and offload candidates at a rank's peak, tensors of one line of the program together."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.simulator.memory.live_at_peak import savings_of
from meshwright.spec.step.simulation_report import SavedTensors
from meshwright.spec.trace.trace import RecordKind
from written_steps import WrittenStep

MATMUL, SILU, EMPTY, TINY = "aten.mm.default", "aten.silu.default", "aten.empty.memory_format", "aten.zeros.default"
UNIT_S = 1000 / PCIE_BYTES_PER_S
"""Seconds in which 1000 bytes get to the host."""
SECONDS = {MATMUL: UNIT_S, SILU: 0.25 * UNIT_S, EMPTY: 0.0, "c10d.recv_.default": 0.0, TINY: 0.0}


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


def found(*, can_offload: bool, step: WrittenStep | None = None) -> dict[str, SavedTensors]:
    trace = (step or network_step()).trace()
    seconds = np.array([SECONDS[one.op] for one in trace.signatures])
    return {saved.op: saved for saved in savings_of(trace, seconds, can_offload=can_offload)}


def test_lines_of_all_blocks_come_together_best_first() -> None:
    saved = found(can_offload=True)
    assert next(iter(saved)) == SILU
    assert {one.scope for one in saved.values()} == {"blocks.*.ffn"}
    assert {op: (one.num_bytes, one.num_tensors) for op, one in saved.items()} == {
        SILU: (400, 2),
        EMPTY: (400, 2),
        MATMUL: (800, 2),
    }
    in_units = {op: (one.recompute_s or 0) / UNIT_S for op, one in saved.items()}
    assert (in_units[SILU], in_units[MATMUL]) == (pytest.approx(0.5), pytest.approx(2.0))
    moved = {op: (one.offload_s or 0) / UNIT_S for op, one in saved.items()}
    assert (moved[SILU], moved[MATMUL]) == (pytest.approx(0.8), pytest.approx(1.6))


def test_what_another_rank_sent_is_only_moved() -> None:
    assert found(can_offload=True)[EMPTY].recompute_s is None
    assert EMPTY not in found(can_offload=False)


def test_a_host_moves_nothing_to_itself() -> None:
    assert {op: one.offload_s for op, one in found(can_offload=False).items()} == {SILU: None, MATMUL: None}


def test_what_is_recomputed_costs_its_chain_back_to_what_is_kept() -> None:
    step = WrittenStep()
    wide = step.make(400, reads=(step.there(40),), op=MATMUL)
    copy = step.make(400, reads=(wide,), op=EMPTY)
    step.op(reads=(copy,), writes=(copy,), op=SILU)
    active = step.make(200, reads=(copy,), op=SILU)
    step.free(copy)
    step.phase = "backward"
    gradient = step.make(350, reads=(wide, active), op=TINY)
    step.free(wide, active, gradient)
    step.op(op=TINY)
    saved = found(can_offload=False, step=step)
    # The copy in between is gone, so that it is recomputed, too; the matmul's output is there.
    assert {op: one.recompute_s for op, one in saved.items()} == {MATMUL: UNIT_S, SILU: 0.5 * UNIT_S}


def test_what_is_gone_before_the_peak_saves_nothing() -> None:
    step = WrittenStep()
    early = step.make(8, op=MATMUL)
    step.phase = "backward"
    step.op(reads=(early,), op=TINY)
    step.free(early)
    step.op(reads=(step.make(1000, op=TINY),), op=TINY)
    assert found(can_offload=False, step=step) == {}
