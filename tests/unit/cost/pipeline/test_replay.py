"""A replayed schedule has the bubbles that are known in closed form, and obeys what any schedule must."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.pipeline.replay import Hops, PipelineOps, StageTimes, pipeline_ops, replay
from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.action import parse_action
from meshwright.spec.layout.schedule.schedule import build_schedule, lower


def ops(schedule: str, pp: int, number: int, stages: int = 1) -> PipelineOps:
    return pipeline_ops(lower(build_schedule(Layout(pp=pp, schedule=schedule, virtual_stages=stages), number)))


def ops_of_texts(*rows: str) -> PipelineOps:
    return pipeline_ops([[parse_action(text) for text in row.split()] for row in rows])


def hops(seconds: float, num_ranks: int) -> Hops:
    return Hops((seconds,) * 3, (0,) * num_ranks, (0,) * num_ranks)


def replay_s(run: PipelineOps, times: StageTimes, hop_s: float) -> float:
    return replay(run, times, hops(hop_s, len(run.of_rank))).total_s


def even(num_stages: int, forward_s: float = 1.0, backward_s: float = 2.0) -> StageTimes:
    return StageTimes([forward_s] * num_stages, [backward_s] * num_stages, [backward_s / 2] * num_stages)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_simple_pipeline_waits_for_the_first_microbatch_and_after_the_last(schedule: str) -> None:
    # (number + pp - 1) x (forward + backward), Narayanan et al. 2021.
    assert replay_s(ops(schedule, 4, 8), even(4), 0.0) == pytest.approx((8 + 3) * 3)


def test_interleaving_divides_the_wait_by_the_stages_of_a_rank() -> None:
    assert replay_s(ops("Interleaved1F1B", 4, 8, 2), even(8, 0.5, 1.0), 0.0) == pytest.approx(8 * 3 + 3 * 3 / 2)


def test_a_zero_bubble_schedule_hardly_waits_if_all_parts_are_equal() -> None:
    # ZB-V waits not at all between the first forward and the last backward of a rank: only for the first to come.
    played_s = replay_s(ops("ZBVZeroBubble", 4, 16, 2), even(8, 0.5, 1.0), 0.0)
    assert 16 * 3 < played_s < replay_s(ops("Interleaved1F1B", 4, 16, 2), even(8, 0.5, 1.0), 0.0)


def test_one_rank_never_waits() -> None:
    assert replay_s(ops("1F1B", 1, 5), even(1), 9.0) == pytest.approx(15)


def test_a_transfer_is_waited_for_between_ranks_only() -> None:
    assert replay_s(ops("1F1B", 2, 1), even(2), 0.25) == pytest.approx(6 + 2 * 0.25)
    # In a V, the two middle stages are one rank's: there and back are two transfers each. Besides four forwards and
    # four backwards to the inputs, two to the weights lie on the way: that of stage 2, before stage 1's turn, and the
    # last.
    assert replay_s(ops("ZBVZeroBubble", 2, 1, 2), even(4), 0.25) == pytest.approx(4 + 4 + 2 + 4 * 0.25)


def test_a_transfer_starts_when_both_its_ends_are_posted() -> None:
    late = ops_of_texts("0F0 0SEND_F0 0F1 0F2", "2F9 1RECV_F0 1F0")
    times = StageTimes([1.0, 1.0, 5.0], [0.0] * 3, [0.0] * 3)
    assert replay_s(late, times, 0.5) == pytest.approx(5 + 0.5 + 1)
    early = ops_of_texts("0F0 0SEND_F0 0F1 0F2", "1RECV_F0 2F9 1F0")
    assert replay_s(early, times, 0.5) == pytest.approx(5 + 1)


def test_a_stage_posts_a_send_once_its_previous_one_has_arrived() -> None:
    waits = ops_of_texts("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0F3", "1RECV_F0 1RECV_F1 1F0 1F1")
    times = StageTimes([1.0, 0.0], [0.0] * 2, [0.0] * 2)
    # The second send is posted at 1 + 4, and two computations follow; the second transfer arrives at 5 + 4.
    assert replay_s(waits, times, 4.0) == pytest.approx(9)
    assert replay_s(waits, times, 1.5) == pytest.approx(1 + 1.5 + 2)
    # A split backward keeps the outputs: they are sent as they come.
    keeps = ops_of_texts("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0F3 0W0", "1RECV_F0 1RECV_F1 1F0 1F1 1I0")
    assert replay(keeps, times, hops(1.5, 2)).total_s == pytest.approx(1 + 2 * 1.5)


def test_two_transfers_out_of_a_rank_share_its_link() -> None:
    # The middle rank sends forward and back at the same moment.
    both = ops_of_texts("0RECV_B0 0B0", "1F0 1SEND_F0 1B1 1SEND_B0 1F1", "2RECV_F0 2F0")
    times = StageTimes([0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3)
    assert replay_s(both, times, 2.0) == pytest.approx(1 + 2 * 2)


def test_two_transfers_into_a_rank_share_its_link() -> None:
    both = ops_of_texts("0F0 0SEND_F0", "1RECV_F0 1RECV_B0 1F0 1B0", "2B0 2SEND_B0")
    assert replay_s(both, StageTimes([0.0] * 3, [0.0] * 3, [0.0] * 3), 2.0) == pytest.approx(2 * 2)


def test_a_transfer_into_a_rank_does_not_slow_one_out_of_it() -> None:
    both = ops_of_texts("0F0 0SEND_F0 0RECV_B0 0B0", "1F1 1B0 1SEND_B0 1RECV_F0 1F0")
    assert replay_s(both, StageTimes([0.0] * 2, [0.0] * 2, [0.0] * 2), 2.0) == pytest.approx(2)


def test_transfers_between_two_ranks_follow_one_another() -> None:
    # Two stages of one rank send to two stages of the other: the first arrives at 2, not at 4, the second at 4.
    row = ops_of_texts("0F0 0SEND_F0 2F0 2SEND_F0", "1RECV_F0 3RECV_F0 1F0 3F0")
    assert replay_s(row, StageTimes([0.0, 1.5, 0.0, 1.0], [0.0] * 4, [0.0] * 4), 2.0) == pytest.approx(4 + 1)


def test_a_hop_takes_what_the_border_takes_that_it_crosses() -> None:
    there = ops_of_texts("0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0", "2RECV_F0 2F0 2SEND_F0", "3RECV_F0 3F0")
    far = Hops(hop_s=(0.5, 2.0, 7.0), domains=(0, 0, 1, 2), pods=(0, 0, 0, 1))
    assert replay(there, even(4, 1.0), far).total_s == pytest.approx(4 + 0.5 + 2.0 + 7.0)


def test_transfers_inside_a_domain_and_to_another_share_no_link() -> None:
    both = ops_of_texts("0RECV_B0 0B0", "1F0 1SEND_F0 1B1 1SEND_B0 1F1", "2RECV_F0 2F0")
    times = StageTimes([0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3)
    assert replay(both, times, Hops((2.0, 2.0, 2.0), (0, 0, 1), (0, 0, 0))).total_s == pytest.approx(1 + 2)


def test_exposed_is_what_a_rank_waits_while_its_transfer_is_under_way() -> None:
    # The second rank waits 1 s for the message to be sent, which is a bubble, and 0.5 s for it to arrive.
    there = ops_of_texts("0F0 0SEND_F0", "1RECV_F0 1F0")
    assert replay(there, even(2, 1.0), hops(0.5, 2)).exposed_s == pytest.approx(0.5 / 2)
    # A rank that is late finds it there.
    late = ops_of_texts("0F0 0SEND_F0", "1RECV_F0 2F0 1F0")
    assert replay(late, StageTimes([1.0, 1.0, 5.0], [0.0] * 3, [0.0] * 3), hops(0.5, 2)).exposed_s == 0


def test_both_ends_of_a_pipeline_exchange_the_gradients_of_a_tied_head() -> None:
    pipeline = ops("1F1B", 4, 8)
    plain, tied = (replay(pipeline, even(4), hops(0.1, 4)._replace(tied_s=seconds)) for seconds in (0.0, 3.0))
    assert tied.total_s == pytest.approx(plain.total_s + 3)
    assert tied.exposed_s == pytest.approx(plain.exposed_s + 3 * 2 / 4)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = StageTimes([1.0, 2.0], [2.0, 4.0], [1.0, 2.0])
    assert replay_s(ops("1F1B", 2, 50), times, 0.0) == pytest.approx(50 * 6 + 3)


@pytest.mark.slow
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
    replayed = ops(schedule, pp, number, stages)
    busy_s = [3 * number * sum(times.forward_s[at] for at in {op.stage for op in own}) for own in replayed.of_rank]
    without_s, with_s = (replay_s(replayed, times, lag) for lag in (0.0, transfer_s))
    assert max(busy_s) - 1e-9 <= without_s <= with_s
