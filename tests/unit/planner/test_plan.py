"""A plan explains itself: what it says of the pick, of what is near it, and of the hardware, agrees with pricing."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from meshwright.cost.communication.pipeline_p2p import hops_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.cost.pipeline.replay import Hops, StageTimes, pipeline_ops, replay
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.step_times import unit_shares
from meshwright.errors import InfeasibleLayout
from meshwright.planner.candidate import judge, recomputed_share
from meshwright.planner.explain.contrasts import LATENCIES, scaled_network
from meshwright.planner.explain.infeasible import invalid_neighbours
from meshwright.planner.plan import find, make_plan
from meshwright.planner.search.bubble import BackwardShares, StageShare, replay_inputs, replayed_share, replayed_step
from meshwright.planner.search.finalists import RANKING_ERROR
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import price, steps_of_each_s
from meshwright.planner.search.space import layout_space
from meshwright.spec.layout.layout import SCHEDULES, SINGLE_STAGE_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.layout.schedule.schedule import build_schedule, lower
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.run.layout_plan import Plan
from meshwright.spec.step.workload import Workload
from questions import ask

QUESTION = ask("llama3-70b", 64, seq_len=8192, batch=64)
FLOAT32 = ask("llama3-8b", 64, batch=512).with_setup(
    workload=Workload(seq_len=8192, global_batch_size=512, precision="float32")
)


SMALL = ask("llama3-8b", 16, batch=64)


@cache
def plan() -> Plan:
    return make_plan(QUESTION, min_scored=0)


@cache
def space_of_small() -> LayoutTable:
    return layout_space(SMALL, menu_of(SMALL))


def total_s(layout: Layout) -> float:
    return judge(layout, QUESTION).estimate.step.total_s


@pytest.mark.slow
def test_the_pick_keeps_the_margin_and_nothing_shown_is_faster_than_the_fastest() -> None:
    answer = plan()
    fastest_s = answer.fastest.estimate.step.total_s
    assert fastest_s <= answer.pick.estimate.step.total_s <= fastest_s * (1 + RANKING_ERROR)
    assert answer.pick.free_bytes >= QUESTION.margin_bytes > 0
    assert answer.pick.layout.num_ranks == 64
    others = [*answer.runners_up, *answer.pareto_front, *(contrast.other for contrast in answer.alternatives)]
    assert len(others) > 10
    for other in others:
        assert other.free_bytes >= QUESTION.margin_bytes
        assert other.estimate.step.total_s >= fastest_s


@pytest.mark.slow
def test_the_estimate_of_the_pick_is_what_judging_its_layout_gives() -> None:
    pick = plan().pick
    assert judge(pick.layout, QUESTION) == pick


@pytest.mark.slow
def test_mfu_is_the_floor_as_a_share_of_the_step() -> None:
    estimate = plan().pick.estimate
    flops = QUESTION.setup.model.flops_per_token(8192) * 64 * 8192
    peak = QUESTION.cluster.device.peak_flops_per_s("bfloat16")
    assert peak is not None
    assert estimate.mfu == pytest.approx(flops / peak / 64 / estimate.step.total_s, rel=0.02)
    assert estimate.hfu is not None
    assert estimate.mfu is not None
    assert estimate.hfu >= estimate.mfu


@pytest.mark.slow
def test_runners_up_are_of_different_splits_and_in_order() -> None:
    splits = [
        runner.layout.model_dump(include={"pp", "dp_replicate", "dp_shard", "cp", "tp"}) for runner in plan().runners_up
    ]
    assert all(splits.count(split) == 1 for split in splits)
    steps = [runner.estimate.step.total_s for runner in plan().runners_up]
    assert steps == sorted(steps)


@pytest.mark.slow
@pytest.mark.parametrize("is_float32", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_layout_of_the_pareto_list_leaves_more_memory_for_more_time(is_float32: bool) -> None:
    # In float32 replays change the order of many layouts.
    found = make_plan(FLOAT32) if is_float32 else plan()
    assert found.pareto_front[0] == found.fastest
    assert found.pick in found.pareto_front
    assert 2 < len(found.pareto_front) <= 13
    front = [candidate for candidate in found.pareto_front if candidate != found.pick or candidate == found.fastest]
    for before, after in pairwise(front):
        assert before.estimate.step.total_s <= after.estimate.step.total_s
        assert before.free_bytes < after.free_bytes
    for other in found.runners_up:
        as_fast = [one for one in front if one.estimate.step.total_s <= other.estimate.step.total_s]
        most_bytes = max(one.free_bytes for one in as_fast)
        assert other.free_bytes < most_bytes + 3 * 2**30, layout_text(other.layout)


@pytest.mark.slow
def test_contrasts_name_another_value_and_where_the_difference_comes_from() -> None:
    pick = plan().pick
    for contrast in plan().alternatives:
        *needed, change = contrast.change.split(", ")
        assert all(one in layout_text(contrast.other.layout) for one in needed)
        name, _, value = change.partition("=")
        if name not in ("reshard_after_forward", "gradient_sync"):
            assert str(getattr(contrast.other.layout, name)).lower() == value.lower()
            assert getattr(contrast.other.layout, name) != getattr(pick.layout, name)
        difference = contrast.other.estimate.step.total_s - pick.estimate.step.total_s
        assert math.fsum(contrast.change_by_component_s.values()) == pytest.approx(difference, abs=1e-6)


@pytest.mark.slow
def test_what_does_not_fit_names_the_class_and_fixes_that_fit() -> None:
    found = [rejection for rejection in plan().rejections if rejection.step_s is not None]
    assert found
    for rejection in found:
        assert re.fullmatch(r"takes \S+ GiB of [a-z ]+, \S+ GiB in all: .+ are missing", rejection.reason)
        assert len(rejection.fixes) <= 3
    assert any(rejection.fixes for rejection in found)


def test_a_degree_that_cannot_be_is_named_with_its_rule() -> None:
    refused = {one.change: one.reason for one in invalid_neighbours(Layout(dp_shard=12, tp=2), ask(num_devices=24))}
    assert refused["tp=3"].startswith("layout.tp = 3 does not divide the model's")
    outside = {one.change: one.reason for one in invalid_neighbours(Layout(dp_shard=2, tp=8), ask(num_devices=16))}
    assert outside["tp=16"].startswith("reaches beyond the 8 devices that NVLink")


@pytest.mark.slow
def test_slower_hardware_is_never_faster_and_the_best_is_no_worse_than_the_pick() -> None:
    found = {one.what: one for one in plan().sensitivities}
    assert set(found) == {
        "matmul and attention rates",
        "memory bandwidth",
        "bandwidth inside nodes",
        "bandwidth between nodes",
        "start of a collective",
    }
    for one in found.values():
        assert one.pick_change >= -1e-6
        assert one.best_change <= one.pick_change + 1e-9
    assert found["matmul and attention rates"].pick_change > 0.1


def test_the_latencies_are_constants_of_the_cost_model() -> None:
    assert set(LATENCIES) <= set(fitted_constants())


@pytest.mark.slow
def test_lower_precision_is_only_a_what_if() -> None:
    (what_if,) = plan().what_ifs
    assert what_if.change == "precision.float8=tensorwise"
    assert plan().workload.precision == "bfloat16"
    assert what_if.best.estimate.step.total_s < plan().pick.estimate.step.total_s
    assert what_if.is_runnable
    (of_others,) = make_plan(ask(num_devices=8).with_setup(stack=load_stack("torchtitan-2025")), min_scored=0).what_ifs
    assert of_others.is_runnable


@pytest.mark.long
@pytest.mark.slow
def test_a_lower_precision_saves_what_a_plan_with_it_finds() -> None:
    # In bfloat16 parameters have to be on the host, in float8 there is room for them.
    asked = ask("llama3.2-3b", 4, cluster="rtx-4090-node", seq_len=8192, batch=16)
    found = make_plan(asked, min_scored=0)
    lower = asked.with_setup(workload=asked.workload.replace(precision="float8-tensorwise"))
    assert found.pick.layout.cpu_offload
    what_if = next(one for one in found.what_ifs if one.change == "precision.float8=tensorwise")
    assert what_if.best.step_s == pytest.approx(make_plan(lower, min_scored=0).fastest.step_s, rel=1e-6)


@pytest.mark.slow
def test_memory_is_told_for_every_pipeline_rank_and_the_fullest_is_the_picks() -> None:
    ranks = plan().memory_by_pipeline_rank
    assert len(ranks) == plan().pick.layout.pp
    assert max(rank.reserved_bytes for rank in ranks) == plan().pick.estimate.memory.reserved_bytes


@pytest.mark.slow
def test_a_layout_that_was_set_is_judged_beside_the_pick() -> None:
    given = Layout(dp_shard=2, tp=8, activation_checkpoint="full")
    answer = make_plan(ask("llama3-8b", 16, seq_len=8192, batch=16, given=given), min_scored=0)
    assert answer.given is not None
    assert answer.given.layout == given
    assert answer.given.estimate.step.total_s > answer.pick.estimate.step.total_s


@pytest.mark.long
@pytest.mark.slow
def test_a_layout_that_was_set_and_does_not_fit_is_the_first_to_be_rejected() -> None:
    given = Layout(dp_shard=8, tp=8, gradient_sync="step")
    answer = make_plan(ask("llama3-70b", 64, seq_len=16_384, batch=64, given=given), min_scored=0)
    assert answer.given is not None
    assert answer.given.free_bytes < 0
    assert " GiB of gradients, " in answer.rejections[0].reason
    assert answer.rejections[0].fixes


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        {"dp_shard": 8, "activation_checkpoint_blocks": ("full",) * 2 + ("selective",) * 6},
        pytest.param({"dp_shard": 4, "pp": 2, "stage_boundaries": (4,)}, marks=pytest.mark.long),
    ],
)
def test_what_a_misfit_alone_says_block_by_block_keeps_no_plan_from_an_answer(said: dict[str, Any]) -> None:
    architecture = PRESETS["llama3-8b"].replace(num_layers=8)
    question = ask(seq_len=16_384, num_devices=8, given=Layout(microbatch_size=4, **said))
    question = replace(question.with_setup(model=model_spec(architecture)), architecture=architecture)
    answer = make_plan(question, min_scored=0)
    assert answer.given is not None
    assert answer.given.free_bytes < 0
    assert answer.rejections[0].step_s == answer.given.step_s
    assert answer.rejections[0].fixes


@pytest.mark.slow
def test_a_layout_that_was_set_and_is_invalid_has_a_reason_and_no_step() -> None:
    answer = make_plan(ask("llama3-8b", 32, batch=16, given=Layout(dp_shard=32)), min_scored=0)
    assert answer.given is None
    assert answer.given_refusal.startswith("a global batch of 16 sequences does not divide by 32 data-parallel ranks")


@pytest.mark.slow
def test_a_plan_can_be_written_and_read() -> None:
    assert Plan.from_json(plan().to_json()) == plan()


@pytest.mark.slow
def test_a_loss_in_chunks_lets_in_what_does_not_fit_without() -> None:
    # The logits of 41,667 tokens of a sequence of a million, and their gradients.
    tight = ask("llama3-8b", 24, seq_len=1_000_000, batch=1, compile_loss=False)
    chunked = find(tight, min_scored=0).priced.layouts
    assert len(chunked)
    assert (chunked.loss_chunks == 16).all()
    with pytest.raises(InfeasibleLayout):
        find(replace(tight, fixed={"loss_chunks": 1, "compile_loss": False}), min_scored=0)


@pytest.mark.long
@pytest.mark.slow
def test_state_waits_in_the_hosts_memory_where_that_pays() -> None:
    roomy, tight = make_plan(ask("llama3-8b", 8, batch=8)), make_plan(ask("llama3-70b", 8, batch=8, pp=1, cp=1, tp=8))
    assert not roomy.pick.layout.cpu_offload
    assert tight.pick.layout.cpu_offload


@pytest.mark.slow
@pytest.mark.parametrize("every", [1999, pytest.param(499, marks=pytest.mark.long)])
def test_a_replayed_pipeline_is_near_its_closed_form(every: int) -> None:
    question, table = SMALL, space_of_small()
    rows = range(0, len(table), every)
    priced = price(table.take(list(rows)), question, only_fitting=False)  # type: ignore[arg-type]
    layouts = [priced.layouts.layout(row) for row in range(len(priced))]
    for row, (layout, inputs) in enumerate(zip(layouts, replay_inputs(layouts, question), strict=True)):
        replayed = replayed_step(priced.step.decomposition(row), layout, question, inputs).total_s
        assert replayed == pytest.approx(priced.total_s[row], rel=0.35), layout


def test_recomputation_counts_for_hfu_alone() -> None:
    shares = [
        recomputed_share(Layout(activation_checkpoint=kind, activation_checkpoint_every=every), QUESTION)
        for kind, every in (("none", 1), ("full", 2), ("full", 1))
    ]
    assert shares[0] == 0
    assert shares[1] == pytest.approx(shares[2] / 2)
    # All blocks once more is a third of forward and backward, but for the head.
    assert 0.3 < shares[2] < 1 / 3


@pytest.mark.slow
def test_a_layout_table_of_one_is_priced_like_a_row_of_many() -> None:
    question, table = SMALL, space_of_small()
    rows = table.take([0, len(table) // 2, len(table) - 1])  # type: ignore[arg-type]
    together = price(rows, question, only_fitting=False).total_s
    alone = [price(layout_table([rows.layout(row)]), question, only_fitting=False).total_s[0] for row in range(3)]
    assert together == pytest.approx(alone)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_questions_asked_at_once_are_answered_as_one_by_one(is_compiled: bool) -> None:
    rows = layout_table([Layout(dp_shard=64, compile=is_compiled), Layout(dp_shard=32, pp=2, compile=True)])
    slower = QUESTION.with_setup(cluster=scaled_network(QUESTION.cluster, 0.5))
    alone = [price(rows, question, only_fitting=False).total_s for question in (QUESTION, slower)]
    assert (alone[0] < alone[1]).all()
    assert steps_of_each_s(rows, [QUESTION, slower]) == pytest.approx(np.stack(alone))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", [44, 64])
def test_a_long_pipeline_takes_what_all_its_actions_take(schedule: str, number: int) -> None:
    stages = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    shares = tuple(np.linspace(0.9, 1.1, 4 * stages) / 4 / stages)
    layout = Layout(pp=4, schedule=schedule, virtual_stages=stages)
    part = 4 / number
    forward_s = [share * part / 3 for share in shares]
    backward_s = [2 * forward for forward in forward_s]
    times = StageTimes(forward_s, backward_s, forward_s)
    splits = schedule in SPLIT_BACKWARD_SCHEDULES
    if splits:
        # The first stage's second part is the whole.
        times = StageTimes(forward_s, backward_s, [backward_s[0], *forward_s[1:]], input_s=[0.0, *forward_s[1:]])
    parts = tuple(StageShare(share, 0.0) for share in shares)
    hops = Hops((0.001,) * 3, (0,) * 4, (0,) * 4)
    replayed = replayed_share((4, stages, schedule, number), parts, BackwardShares(0.0, 0.0, split=float(splits)), hops)
    whole = replay(pipeline_ops(lower(build_schedule(layout, number))), times, hops)
    assert replayed.total_s == pytest.approx(whole.total_s, rel=2e-3)
    # Where all forwards come first, later rounds wait more for what is under way and less for what is not.
    assert replayed.exposed_s == pytest.approx(whole.exposed_s, abs=0.02)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_no_pipeline_is_faster_than_its_busiest_rank(schedule: str) -> None:
    # A head larger than what a rank computes in the mean, and blocks that recompute.
    question = ask("qwen3-0.6b", 16, seq_len=4096, batch=32)
    layout = Layout(pp=8, dp_shard=2, schedule=schedule, compile=True, activation_checkpoint="full")
    step = judge(layout, question).estimate.step
    head = unit_shares(question.configs(layout_table([layout])))[0][-1]
    steady_s = step.total_s - step.pipeline_bubble_s - step.pipeline_p2p_s - step.optimizer_s - step.stragglers_s
    assert head > 1.1 / layout.pp
    assert step.total_s > 0.98 * head * layout.pp * steady_s


def test_a_pipeline_of_one_microbatch_takes_all_its_stages_and_both_transfers() -> None:
    question = ask("llama3-8b", 16, seq_len=2048, batch=8, cluster="rtx-4090-eth100")
    layout = Layout(pp=2, dp_shard=8)
    step = judge(layout, question).estimate.step
    steady_s = step.total_s - step.pipeline_bubble_s - step.pipeline_p2p_s - step.optimizer_s - step.stragglers_s
    # Each rank is a node of its own.
    transfer_s = hops_of(question.configs(layout_table([layout])), fitted_constants())[0].hop_s[1]
    assert transfer_s > 0.001 * steady_s
    # Of steady_s, the mean of both ranks, all is done one after the other.
    assert step.pipeline_bubble_s + step.pipeline_p2p_s == pytest.approx(steady_s + 2 * transfer_s, rel=5e-3)


@pytest.mark.slow
def test_how_many_layouts_are_shown_changes_no_figure() -> None:
    few, many = (make_plan(ask(num_devices=8, batch=32), number, min_scored=0) for number in (0, 7))
    assert (len(few.runners_up), len(many.runners_up)) == (0, 7)
    assert few.what_ifs == many.what_ifs
    assert few.sensitivities == many.sensitivities
    assert few.pareto_front == many.pareto_front
