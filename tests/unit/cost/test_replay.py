"""Playing a schedule gives the bubbles that are known in closed form, and obeys what any schedule must."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.replay import StageTimes, replay_s
from meshwright.spec.action import Action
from meshwright.spec.layout import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.schedule_orders import order_of_rank


def orders(schedule: str, pp: int, number: int, stages: int = 1) -> list[tuple[Action, ...]]:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=stages)
    return [order_of_rank(rank, layout, number) for rank in range(pp)]


def even(num_stages: int, forward_s: float = 1.0, backward_s: float = 2.0) -> StageTimes:
    return StageTimes([forward_s] * num_stages, [backward_s] * num_stages, [backward_s / 2] * num_stages)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_simple_pipeline_waits_for_the_first_microbatch_and_after_the_last(schedule: str) -> None:
    # (number + pp - 1) x (forward + backward), Narayanan et al. 2021.
    assert replay_s(orders(schedule, 4, 8), even(4), 0.0) == pytest.approx((8 + 3) * 3)


def test_interleaving_divides_the_wait_by_the_stages_of_a_rank() -> None:
    assert replay_s(orders("Interleaved1F1B", 4, 8, 2), even(8, 0.5, 1.0), 0.0) == pytest.approx(8 * 3 + 3 * 3 / 2)


def test_a_zero_bubble_schedule_hardly_waits_if_all_parts_are_equal() -> None:
    # ZB-V waits not at all between the first forward and the last backward of a rank: only for the first to come.
    played_s = replay_s(orders("ZBVZeroBubble", 4, 16, 2), even(8, 0.5, 1.0), 0.0)
    assert 16 * 3 < played_s < replay_s(orders("Interleaved1F1B", 4, 16, 2), even(8, 0.5, 1.0), 0.0)


def test_one_rank_never_waits() -> None:
    assert replay_s(orders("1F1B", 1, 5), even(1), 9.0) == pytest.approx(15)


def test_a_transfer_is_waited_for_between_ranks_only() -> None:
    assert replay_s(orders("1F1B", 2, 1), even(2), 0.25) == pytest.approx(6 + 2 * 0.25)
    # In a V, the two middle stages are one rank's: there and back are two transfers each. Besides four forwards and
    # four backwards to the inputs, two to the weights lie on the way: that of stage 2, before stage 1's turn, and the
    # last.
    assert replay_s(orders("ZBVZeroBubble", 2, 1, 2), even(4), 0.25) == pytest.approx(4 + 4 + 2 + 4 * 0.25)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = StageTimes([1.0, 2.0], [2.0, 4.0], [1.0, 2.0])
    assert replay_s(orders("1F1B", 2, 50), times, 0.0) == pytest.approx(50 * 6 + 3)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 5),
    st.integers(1, 4),
    st.lists(st.floats(0.1, 2.0), min_size=20, max_size=20),
    st.floats(0, 0.5),
)
def test_no_pipeline_is_faster_than_its_busiest_rank(
    schedule: str, pp: int, rounds: int, forward_s: list[float], transfer_s: float
) -> None:
    stages = 2 if schedule in (*LOOPED_SCHEDULES, *V_SCHEDULES) else 1
    number = rounds * pp * stages
    times = StageTimes(forward_s[: pp * stages], [2 * s for s in forward_s[: pp * stages]], forward_s[: pp * stages])
    played = orders(schedule, pp, number, stages)
    busy_s = [3 * number * sum(times.forward_s[stage] for stage in {a.stage for a in order}) for order in played]
    without_s, with_s = (replay_s(played, times, lag) for lag in (0.0, transfer_s))
    assert max(busy_s) - 1e-9 <= without_s <= with_s
