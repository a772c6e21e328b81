"""What the actions of a pipeline take on each stage: together what a rank computes, whatever is done twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.search.bubble import BackwardShares, StageShare, stage_times

STAGES = (StageShare(0.2, 0.02), StageShare(0.25, 0.0), StageShare(0.25, 0.0), StageShare(0.2, 0.08))
SHARE = st.floats(0.0, 0.3)


@given(SHARE)
def test_both_parts_of_a_backward_come_to_what_a_rank_computes(recomputed: float) -> None:
    times = stage_times(STAGES, BackwardShares(recomputed, repeated=0.0, split=1.0), 2.0)
    assert times.input_s is not None
    assert sum(map(sum, (times.forward_s, times.input_s, times.weight_s))) == pytest.approx(2.0)


def test_the_first_stage_has_nothing_to_do_for_its_inputs() -> None:
    times = stage_times(STAGES, BackwardShares(0.1, 0.3, split=1.0), 1.0)
    assert times.input_s is not None
    assert times.input_s[0] == 0
    assert times.weight_s[0] == times.backward_s[0]


def test_compiled_blocks_run_whole_in_either_part_and_ends_do_not() -> None:
    # All stages but the first have 0.7 of the blocks' 0.9, and repeat two thirds of what they do once.
    again = 2 / 3 * 0.7 / 0.9
    shares = BackwardShares(0.0, repeated=0.9 * again / (1 + again), split=1.0)
    times = stage_times(STAGES, shares, 1.0)
    assert times.input_s is not None
    assert times.input_s[1] == pytest.approx(times.backward_s[1])
    assert times.weight_s[1] == pytest.approx(times.backward_s[1])
    assert times.input_s[3] < times.backward_s[3]


def test_a_whole_backward_recomputes_once() -> None:
    times = stage_times(STAGES, BackwardShares(0.25, 0.0, split=0.0), 1.0)
    assert sum(times.forward_s) + sum(times.backward_s) == pytest.approx(1.0)
    assert times.backward_s[1] - 2 * times.forward_s[1] == pytest.approx(0.25 * 0.25 / 0.9)


def test_what_blocks_do_again_leaves_the_ends_their_share() -> None:
    stages = (StageShare(0.5, 0.0), StageShare(0.0, 0.5))
    times = stage_times(stages, BackwardShares(0.125, 0.0, split=0.0), 1.0)
    assert times.forward_s[1] + times.backward_s[1] == pytest.approx(0.5)
