"""The peak of a step by what is alive, and what taking some of it away would buy."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.simulator.memory.live_at_peak import liveness_of
from meshwright.spec.step.liveness import Liveness, Saving
from meshwright.spec.trace.trace import RecordKind
from written_steps import WrittenStep

_SECONDS = {"aten.mm.default": 1.0, "aten.silu.default": 0.25, "aten.cat.default": 0.0}
_HOST_BYTES_PER_S = 100.0


def found(step: WrittenStep) -> Liveness:
    trace = step.trace()
    return liveness_of(trace, np.array([_SECONDS[one.op] for one in trace.signatures]), _HOST_BYTES_PER_S)


def network_step() -> tuple[WrittenStep, list[int]]:
    """Return mm, then silu of a copy of it, then a product whose inputs backward needs; and the kept storages."""
    step = WrittenStep()
    weight = step.there(40)
    step.scope = "block.ffn"
    wide = step.make(400, reads=(weight,), flops=80)
    copy = step.make(400, reads=(wide,), op="aten.silu.default")
    active = step.make(200, reads=(copy,), op="aten.silu.default")
    step.free(copy)
    step.scope = "block"
    kinds = {"kind": int(RecordKind.COLLECTIVE), "group": 0}
    gathered = step.make(100)
    step.op(reads=(gathered,), writes=(gathered,), op="aten.cat.default", **kinds)
    step.phase, step.scope = "backward", "block.ffn"
    gradient = step.make(350, reads=(wide, active, gathered, weight))
    step.free(wide, active, gathered, gradient)
    step.op()
    return step, [wide, active, gathered]


def test_the_peak_is_where_most_bytes_are_alive() -> None:
    live = found(network_step()[0])
    assert live.peak_bytes == 40 + 400 + 200 + 100 + 350
    assert (live.phase, live.scope, live.op) == ("backward", "block.ffn", "aten.mm.default")
    assert {name: size for name, size in live.by_role.items() if size} == {
        "parameter": 40,
        "activation": 700,
        "temporary": 350,
    }
    assert [one.num_bytes for one in live.largest] == [400, 350, 200, 100, 40]
    assert (live.largest[0].op, live.largest[0].scope, live.largest[0].phase) == (
        "aten.mm.default",
        "block.ffn",
        "forward",
    )
    assert live.largest[-1].op == ""


def by_storage(live: Liveness) -> dict[int, Saving]:
    return {saving.tensor.storage: saving for saving in live.savings}


def test_what_is_made_again_costs_its_chain_back_to_what_is_kept() -> None:
    step, (wide, active, _) = network_step()
    savings = by_storage(found(step))
    assert (savings[wide].recompute_s, savings[wide].recompute_flops) == (1.0, 80)
    # The copy in between is gone, so that it is made again, too; the matmul's output is there.
    assert (savings[active].recompute_s, savings[active].recompute_flops) == (0.5, 0)


def test_nothing_is_made_again_that_ranks_would_have_to_talk_for() -> None:
    step, (_, _, gathered) = network_step()
    saving = by_storage(found(step))[gathered]
    assert saving.recompute_s is None
    assert saving.recompute_flops is None
    assert saving.offload_s == pytest.approx(2 * 100 / _HOST_BYTES_PER_S)


def test_what_buys_most_bytes_a_second_comes_first() -> None:
    savings = found(network_step()[0]).savings
    # 400 bytes in 1 s; 200 in 0.5 s; 100 to the host and back in 2 s.
    assert [saving.bytes_per_s for saving in savings] == [400, 400, 50]


def test_what_is_gone_before_the_peak_saves_nothing() -> None:
    step = WrittenStep()
    early = step.make(8)
    step.phase = "backward"
    step.op(reads=(early,))
    step.free(early)
    late = step.make(1000)
    step.op(reads=(late,))
    live = found(step)
    assert live.peak_bytes == 1000
    assert live.savings == ()
