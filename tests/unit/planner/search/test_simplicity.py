"""Of layouts that are as fast as the fastest the simplest is picked, and what no run backs is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.layout_table import layout_table
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.planner.candidate import LEFT_OUT_ERROR, judge, unmeasured_features
from meshwright.planner.plan import find, make_plan
from meshwright.planner.search.finalists import MEMORY_STEP, RANKING_ERROR, complexity, complexity_of
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.spec.run.layout_plan import Candidate
from questions import ask

SIMPLE_FIRST = [
    Layout(dp_shard=16, compile=True),
    Layout(dp_shard=16, gradient_sync="step"),
    Layout(dp_shard=16, gradient_sync="step", reshard_after_forward="never"),
    Layout(dp_replicate=2, dp_shard=8, compile=True),
    Layout(dp_shard=16, ep=2),
    Layout(dp_shard=8, tp=2),
    Layout(dp_shard=8, tp=2, async_tp=True),
    Layout(dp_shard=4, tp=4),
    Layout(dp_shard=8, cp=2),
    Layout(dp_shard=8, cp=2, cp_method="ring"),
    Layout(dp_shard=4, cp=2, tp=2),
    Layout(dp_shard=8, pp=2),
    Layout(dp_shard=4, pp=4),
    Layout(dp_shard=8, pp=2, schedule="Interleaved1F1B"),
    Layout(dp_shard=8, pp=2, schedule="ZBVZeroBubble"),
]


SAVING = ("microbatch_size", "activation_checkpoint", "activation_offload", "loss_chunks")
"""Keys that make no layout simpler or more complex."""


def test_layouts_are_ordered_from_simple_to_complex() -> None:
    keys = list(zip(*(column.tolist() for column in complexity(layout_table(SIMPLE_FIRST))), strict=True))
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_more_stages_of_one_schedule_are_no_more_complex() -> None:
    few, many = (Layout(dp_shard=8, pp=2, schedule="Interleaved1F1B", virtual_stages=number) for number in (2, 6))
    of_few, of_many = zip(*(column.tolist() for column in complexity(layout_table([few, many]))), strict=True)
    assert of_few == of_many


@pytest.mark.long
@pytest.mark.slow
def test_no_pipeline_is_picked_for_less_than_the_error_of_ranking() -> None:
    # With tp, whose collectives compiled blocks hide, no pipeline is faster; nor is one of fewer sequences.
    question = ask("llama3-8b", 8, seq_len=8192, batch=1024, tp=1)
    answer = make_plan(question)
    pick, fastest = answer.pick, answer.fastest
    assert pick.layout.pp == 1 < fastest.layout.pp
    assert pick.estimate.step.total_s <= fastest.estimate.step.total_s * (1 + RANKING_ERROR)
    assert pick.free_bytes >= question.margin_bytes


@pytest.mark.slow
def test_defaults_win_within_the_error_of_ranking() -> None:
    question = ask("llama3.2-3b", 8, seq_len=8192, batch=256)
    answer = make_plan(question)
    pick, fastest = answer.pick, answer.fastest
    saving = {key: getattr(pick.layout, key) for key in SAVING}
    assert pick.layout == Layout(**saving, dp_shard=8, compile=True, compile_loss=True)
    assert (fastest.layout.dp_shard, fastest.layout.reshard_after_forward) == (8, "never")
    assert _total_s(fastest) < _total_s(pick), "there is something to leave out"


@pytest.mark.slow
def test_memory_decides_between_equally_simple_layouts_that_are_as_fast() -> None:
    question = ask("llama3.2-3b", 8, seq_len=65536, batch=16)
    pick, priced = make_plan(question).pick, find(question).priced
    assert pick.layout.pp == 1, "no pipeline is replayed, so that the table says all"
    is_alike = np.all(np.equal(np.stack(complexity(priced.layouts)).T, complexity_of(pick)), axis=1)
    usable_bytes = question.cluster.device.usable_memory_bytes
    fastest_s = priced.total_s[is_alike].min()
    assert fastest_s < _total_s(pick) < 1.01 * fastest_s
    roomier = is_alike & (priced.headroom_bytes > pick.headroom_bytes + MEMORY_STEP * usable_bytes)
    assert priced.total_s[roomier].min(initial=np.inf) > 1.01 * fastest_s


@pytest.mark.slow
def test_a_pick_that_is_as_simple_as_the_fastest_layout_is_not_called_simpler() -> None:
    alike = {"tp": 1, "cp": 1, "reshard_after_forward": "always", "gradient_sync": "microbatch"}
    roomier = make_plan(ask("llama3.2-3b", 8, seq_len=65_536, batch=16, dp_shard=8, **alike))
    pick, fastest = roomier.pick, roomier.fastest
    assert (pick.layout.microbatch_size, fastest.layout.microbatch_size) == (1, 2)
    assert complexity_of(pick) == complexity_of(fastest)
    assert pick.headroom_bytes > fastest.headroom_bytes
    assert not roomier.is_simpler


@pytest.mark.long
@pytest.mark.slow
def test_a_pick_that_is_simpler_is_called_so() -> None:
    assert make_plan(ask("llama3-8b", 8, seq_len=8192, batch=128)).is_simpler


def _total_s(candidate: Candidate) -> float:
    return candidate.estimate.step.total_s


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp_shard=8, pp=2, schedule="DualPipeV"), ["schedule=DualPipeV (split backward)"]),
        (Layout(dp_shard=8, cp=2, cp_method="ring"), ["cp_method=ring"]),
        (Layout(dp_shard=8, tp=2, async_tp=True, compile=True), ["async_tp=true (measured with torchtitan only)"]),
        (Layout(dp_shard=8, tp=2, compile=True), []),
        (Layout(dp_shard=16, cp_method="ring"), []),
    ],
)
def test_what_no_run_backs_is_named_and_widens_the_interval(layout: Layout, words: list[str]) -> None:
    question = ask("llama3-8b", 16, batch=64)
    candidate = judge(layout, question)
    assert list(candidate.unmeasured) == words
    expected = np.hypot(question.setup.stack.relative_error, LEFT_OUT_ERROR * len(words))
    assert candidate.estimate.relative_error == pytest.approx(expected)


@pytest.mark.slow
def test_no_published_run_has_what_is_called_unmeasured(published_runs: list[MeasuredRun]) -> None:
    layouts = [run.layout for run in published_runs if run.layout is not None]
    assert len(layouts) > 600
    assert not [layout for layout in layouts if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES]
    assert {layout.cp_method for layout in layouts if layout.cp > 1} == {"all-gather"}
    stacks = {run.row.stack for run in published_runs if run.layout is not None and run.layout.async_tp}
    assert {stack.split("-")[0] for stack in stacks} == {"torchtitan"}
    setup = ask("llama3-8b", 16, batch=64).setup
    assert any(unmeasured_features(layout, setup) for layout in layouts)


def test_a_precision_that_is_planned_and_not_trained_is_named() -> None:
    setup = ask("llama3-8b", 16, batch=64).setup
    low = replace(setup, workload=setup.workload.replace(precision="nvfp4"))
    (feature,) = unmeasured_features(Layout(dp_shard=16), low)
    assert feature == "precision=nvfp4 (meshwright does not train in it yet)"


def test_compiled_blocks_run_the_backward_twice_where_it_is_split() -> None:
    question = ask("llama3-8b", 8, batch=64)
    pipeline = Layout(pp=2, dp_shard=4, compile=True)

    def repeat_s(**changes: object) -> float:
        return judge(pipeline.replace(**changes), question).estimate.step.repeated_backward_s

    whole = judge(pipeline, question).estimate.step
    computed_s = (
        whole.model_flops_at_peak_s
        + whole.gemm_inefficiency_s
        + whole.tile_and_wave_quantization_s
        + whole.attention_inefficiency_s
        + whole.memory_bound_ops_s
    )
    # Backward is two thirds of a step; the head, an eighth of this one, is not compiled, and the first of four stages
    # has no first part.
    assert 0.4 < repeat_s(schedule="ZBVZeroBubble") / computed_s < 2 / 3 * 3 / 4
    assert 0 < repeat_s(schedule="DualPipeV") < 0.3 * repeat_s(schedule="ZBVZeroBubble")
    assert repeat_s(schedule="ZBVZeroBubble", compile=False) == repeat_s(schedule="Interleaved1F1B") == 0


def test_one_device_keeps_the_defaults_of_what_nothing_is_sharded_for() -> None:
    answer = make_plan(ask("llama3.2-1b", 1, seq_len=8192, batch=64))
    assert answer.fsdp_alone is not None
    rows = (answer.pick, answer.fastest, answer.fsdp_alone, *answer.runners_up, *answer.pareto_front)
    assert {(row.layout.reshard_after_forward, row.layout.gradient_sync) for row in rows} == {("auto", "auto")}
