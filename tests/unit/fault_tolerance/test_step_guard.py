"""The rule of spikes, and what a checkpoint holds of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import NonFiniteError
from meshwright.fault_tolerance.step_guard import StepGuard
from meshwright.spec.job.guards_section import GuardsSection

SECTION = GuardsSection(not_finite="skip", spike_deviations=4.0, window=8, max_skips=3, max_rollbacks=1)
NAN = math.nan


def guard_after(*losses: float) -> StepGuard:
    guard = StepGuard(SECTION)
    for step, loss in enumerate(losses, start=1):
        guard.decide(step, loss, 1.0)
    return guard


def test_a_spike_is_judged_by_updates_that_were_taken() -> None:
    guard = guard_after(1.0, 1.2, 0.8)
    assert guard.decide(4, 50.0, 1.0) == "take", "three updates are too few"
    guard = guard_after(1.0, 1.2, 0.8, 1.0)
    assert guard.decide(5, 50.0, 1.0) == "skip"
    assert "loss 50 is a spike" in guard.reason
    assert guard.decide(6, 1.1, 50.0) == "skip"
    assert "gradient norm 50" in guard.reason
    assert guard.decide(7, 1.1, 1.0) == "take"
    assert not guard.is_skipping


def test_a_value_that_is_not_finite_never_enters_the_window() -> None:
    guard = guard_after(1.0, NAN, 1.2, math.inf, 0.8, 1.0)
    assert guard.state()["losses"] == [1.0, 1.2, 0.8, 1.0]
    assert guard.decide(7, 1.1, 1.0) == "take"


def test_skips_in_a_row_roll_back_and_then_stop() -> None:
    guard = guard_after(1.0, 1.0)
    assert [guard.decide(step, NAN, 1.0) for step in (3, 4, 5)] == ["skip", "skip", "roll back"]
    guard.restore({"losses": [1.0], "grad_norms": [1.0]})
    guard.rolled_back(4)
    assert (guard.num_rollbacks, guard.left_out_steps, guard.is_skipping) == (1, 4, False)
    assert [guard.decide(step, NAN, 1.0) for step in (2, 3)] == ["skip", "skip"]
    with pytest.raises(NonFiniteError, match=r"step 4: loss nan is not finite.*guards\.max_rollbacks = 1"):
        guard.decide(4, NAN, 1.0)


values = st.floats(-5, 5) | st.sampled_from([NAN, math.inf, 1e30])


@given(st.lists(st.tuples(values, values), max_size=40), st.integers(0, 40))
def test_a_restored_guard_decides_as_the_one_that_was_saved(steps: list[tuple[float, float]], cut: int) -> None:
    section = SECTION.replace(max_skips=1000)
    whole, first, second = StepGuard(section), StepGuard(section), StepGuard(section)
    decisions = [whole.decide(step, *pair) for step, pair in enumerate(steps)]
    parts = [first.decide(step, *pair) for step, pair in enumerate(steps[:cut])]
    second.restore(first.state())
    parts += [second.decide(step, *pair) for step, pair in enumerate(steps[cut:], start=cut)]
    assert parts == decisions
    assert second.state() == whole.state()
