"""The bubble in closed form is the one that is seen when every action is played, and no rank holds a block too few."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_configs import changed, configs, training_setup
from meshwright.cost.blocks.work import work_of
from meshwright.cost.layout_table import Floats, layout_table
from meshwright.cost.pipeline.replay import Hops, StageTimes, pipeline_ops, replay
from meshwright.cost.pipeline.stage import BlocksPerRank, blocks_per_rank, bubble_share
from meshwright.spec.layout.layout import (
    LOOPED_SCHEDULES,
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    Layout,
)
from meshwright.spec.layout.schedule.schedule import build_schedule, lower
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.layout.stage_split import split_stages


def at_once(num_ranks: int) -> Hops:
    return Hops((0.0,) * 3, (0,) * num_ranks, (0,) * num_ranks)


def closed_s(layout: Layout, number: int) -> float:
    """Return the pipeline's seconds if a rank computes one for each microbatch."""
    return number + float(bubble_share(layout_table([layout]), np.array([number]))[0])


def played_s(layout: Layout, number: int, backward: float = 2.0, weight_share: float = 1 / 3) -> float:
    """Return the same, played; a backward takes `backward` times a forward."""
    forward_s = 1 / (1 + backward) / layout.stages_per_rank
    backward_s = [backward * forward_s] * layout.num_stages
    weight_s = [weight_share / layout.stages_per_rank] * layout.num_stages
    times = StageTimes([forward_s] * layout.num_stages, backward_s, weight_s)
    return replay(pipeline_ops(lower(build_schedule(layout, number))), times, at_once(layout.pp)).total_s


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("pp", [3, 6, 12])
def test_split_backwards_wait_as_replayed_with_few_and_many_microbatches(schedule: str, repeats: bool, pp: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=2)
    table = layout_table([layout])
    for number in (1, pp // 3, pp, 2 * pp, 5 * pp):
        one = [1.0] * layout.num_stages
        parts = pipeline_ops(lower(build_schedule(layout, number)))
        times = StageTimes(one, [2.0] * layout.num_stages, one, repeats=repeats)
        replayed = replay(parts, times, at_once(pp)).total_s
        closed = number + float(bubble_share(table, np.array([number]), float(repeats))[0])
        # In units of a rank's forward and backward of one microbatch: the whole backward runs in each part.
        assert closed == pytest.approx(replayed / (2 * (5 if repeats else 3)), rel=0.005)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 6),
    st.sampled_from([1.8, 2.0, 3.0]),
)
def test_the_bubble_is_the_one_that_is_played(
    schedule: str, pp: int, stages: int, rounds: int, backward: float
) -> None:
    stages = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2 if schedule in V_SCHEDULES else stages
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=stages)
    number = rounds * pp
    assume(not schedule_problems(layout, number))
    if schedule not in SPLIT_BACKWARD_SCHEDULES:
        assert closed_s(layout, number) == pytest.approx(played_s(layout, number, backward), rel=0.01)
    elif schedule == "InterleavedZeroBubble" or rounds > 1:
        # With pp microbatches a V drains before it has filled; finalists are played.
        assert closed_s(layout, number) == pytest.approx(played_s(layout, number, backward), rel=0.04)


@pytest.mark.parametrize("schedule", SINGLE_STAGE_SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 4, 16])
def test_a_plain_pipeline_waits_for_one_microbatch_less_than_it_has_ranks(schedule: str, pp: int) -> None:
    assert closed_s(Layout(pp=pp, schedule=schedule), 32) - 32 == pp - 1


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_looped_stages_divide_the_bubble(schedule: str, stages: int) -> None:
    assert closed_s(Layout(pp=8, schedule=schedule, virtual_stages=stages), 32) - 32 == 7 / stages


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD_SCHEDULES)
def test_a_split_backward_fills_some_of_the_bubble_and_never_all(schedule: str) -> None:
    looped, split = (Layout(pp=8, schedule=name, virtual_stages=2) for name in ("Interleaved1F1B", schedule))
    assert 0 < closed_s(split, 32) - 32 < (closed_s(looped, 32) - 32) * 0.5


def stages(model: str, *layouts: Layout, kind: str = "even") -> BlocksPerRank:
    these = configs(changed(training_setup(model), stages=kind), *layouts)
    return blocks_per_rank(these, work_of(these))


def test_blocks_that_do_not_divide_leave_the_last_rank_fewer() -> None:
    found = stages("llama3-8b", Layout(pp=5))
    assert (found.blocks_inside[0], found.blocks_last[0]) == (7, 4)


def test_embedding_and_head_count_as_blocks_where_that_divides() -> None:
    # 126 blocks are 128 with both ends: 8 on each of 16 ranks but the first and the last, as Llama 3 was trained.
    found = stages("llama3-405b", Layout(pp=16), Layout(pp=8, schedule="Interleaved1F1B", virtual_stages=8))
    assert found.blocks_inside.tolist() == [8, 16]
    assert found.blocks_last.tolist() == [7, 15]


@settings(max_examples=60)
@given(
    st.sampled_from(["llama3-8b", "llama3-70b", "llama3-405b", "deepseek-v3"]),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["even", "balanced"]),
    st.floats(0, 5),
    st.floats(0.01, 10),
)
def test_the_slowest_rank_is_no_faster_than_the_mean(
    model: str, pp: int, per_rank: int, kind: str, first_s: float, last_s: float
) -> None:
    per_rank = 1 if pp == 1 else per_rank
    schedule = LOOPED_SCHEDULES[0] if per_rank > 1 else "1F1B"
    found = stages(model, Layout(pp=pp, schedule=schedule, virtual_stages=per_rank), kind=kind)
    blocks_s = found.num_blocks

    def slowest(first: float) -> Floats:
        return found.slowest_s(blocks_s, np.array([first]), np.array([last_s]))

    assert slowest(0.0) >= (blocks_s + last_s) / pp * (1 - 1e-9)
    if pp == 1:
        assert slowest(first_s) == blocks_s + first_s + last_s


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_balanced_stages_are_never_slower_than_even_ones(pp: int) -> None:
    seconds = []
    for kind in ("even", "balanced"):
        found = stages("llama3-8b", Layout(pp=pp), kind=kind)
        seconds.append(float(found.slowest_s(np.array([32.0]), np.zeros(1), np.array([2.0]))[0]))
    assert seconds[1] <= seconds[0]
    # Two blocks' worth of head on the last of 16 ranks: it alone, or next to two blocks.
    if pp == 16:
        assert seconds == [4.0, 3.0]


@given(num_blocks=st.integers(8, 60), pp=st.sampled_from([2, 3, 4, 8]), head=st.floats(0.0, 12.0))
def test_the_slowest_rank_of_balanced_stages_is_that_of_the_best_split(num_blocks: int, pp: int, head: float) -> None:
    assume(num_blocks >= 2 * pp)
    one, block_s, inside = np.ones(1), 0.01, math.ceil(num_blocks / pp)
    last = max(num_blocks - inside * (pp - 1), 1)
    stages = BlocksPerRank(pp * one, num_blocks * one, inside * one, last * one, np.array([True]), one)
    units = [0.0, *[block_s] * num_blocks, head * block_s]
    edges = [0, *(boundary + 1 for boundary in split_stages(units, [1] * len(units), pp)), len(units)]
    best_s = max(sum(units[start:stop]) for start, stop in itertools.pairwise(edges))
    slowest_s = stages.slowest_s(num_blocks * block_s * one, 0 * one, head * block_s * one)[0]
    assert slowest_s == pytest.approx(best_s)
