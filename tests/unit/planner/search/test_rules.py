"""The rules on arrays and the rules in words are the same rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.layout_table import layout_table
from meshwright.planner.explain.infeasible import invalid_reason
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.rules import is_valid
from meshwright.spec.job.attention_rules import (
    attention_layout_problems,
    attention_model_problems,
    device_problem,
)
from meshwright.spec.job.memory_rules import memory_layout_problems
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.optimizer_rules import block_problems, update_problems
from meshwright.spec.job.sections import OptimizerSection
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.model.moe_architecture import MoEArchitecture
from questions import ask

SMALL = st.sampled_from((1, 1, 1, 2, 2, 3, 4))
OPTIMIZERS = (
    *[("adamw", "float32", False)] * 3,
    ("muon", "bfloat16", False),
    ("adamw", "int8", False),
    ("adamw", "bfloat16", True),
)

POOLS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"embedding": "uvm"},
    {"optimizer_state": "uvm"},
    {"communication": "nccl"},
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout that breaks few rules: most choices are usual ones, and each may be an odd one."""
    pp, tp = draw(SMALL), draw(st.sampled_from((1, 1, 2, 4, 8, 16, 3)))
    schedule = draw(st.sampled_from(SCHEDULES))
    is_split, compile = schedule in SPLIT_BACKWARD_SCHEDULES, draw(st.booleans())
    usual = None if pp > 1 else 1
    return Layout(
        pp=pp,
        dp_replicate=draw(st.sampled_from((1, 1, 2))),
        dp_shard=draw(SMALL),
        cp=draw(SMALL),
        tp=tp,
        ep=draw(st.sampled_from((1, 1, 1, 1, 2, 4, 16))),
        etp=draw(st.sampled_from((1, 1, 1, 1, tp, 2))),
        microbatch_size=draw(st.sampled_from((1, 1, 2, 3))),
        schedule=schedule,
        virtual_stages=draw(st.sampled_from((usual, usual, usual, 1, 2, 3, 12))),
        cp_method=draw(st.sampled_from(("all-gather", "ring", "ulysses"))),
        attention_backend=draw(st.sampled_from(("auto", "auto", "auto", "auto", "flash", "cudnn", "flex", "varlen"))),
        async_tp=draw(st.sampled_from((False, False, False, True))),
        activation_checkpoint=draw(st.sampled_from(("none", "selective", "full"))),
        activation_checkpoint_every=draw(st.sampled_from((1, 1, 1, 2))),
        reshard_after_forward=draw(st.sampled_from(("never", "never", "always") if is_split else ("never", "always"))),
        compile=compile,
        cpu_offload=draw(st.sampled_from((False, False, False, True))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[PlanRequest, Layout]:
    """Draw a layout with a model, a batch and sequences that it mostly divides, but for one factor now and then."""
    layout = draw(layouts())
    dense, mixed = ("llama-1m", "llama3-8b", "llama3-70b"), ("moe-4m", "mla-moe-4m", "gpt-oss-4m", "mixtral-8x7b")
    model = draw(st.sampled_from(mixed if layout.ep * layout.etp > 1 else (*dense, *dense, *mixed)))
    seq_len = layout.cp * layout.tp * draw(st.sampled_from((1, 2, 3, 8, 64)))
    per_pass, number = layout.dp * layout.microbatch_size, draw(st.integers(1, 4 * layout.num_stages))
    batch = per_pass * number if draw(st.integers(0, 9)) else per_pass * number + 1
    question = ask(model, 8, seq_len=seq_len, batch=batch)
    name, dtype, in_backward = draw(st.sampled_from(OPTIMIZERS))
    kept = {"optimizer": name, "optimizer_state_dtype": dtype, "updates_in_backward": in_backward}
    kept |= {"masks_documents": draw(st.booleans()), "precision": draw(st.sampled_from(("bfloat16", "float32")))}
    memory = draw(st.sampled_from(POOLS))
    question = question.with_setup(workload=question.workload.replace(**kept), memory=MemorySection.from_dict(memory))
    num_ranks = layout.num_ranks if draw(st.integers(0, 9)) else layout.num_ranks + 8
    return question.with_setup(cluster=question.cluster.model_copy(update={"num_devices": num_ranks})), layout


def problems(layout: Layout, question: PlanRequest) -> list[str]:
    """Return what the rules in words say, the way the checks of a job put them together."""
    batch, per_pass = question.workload.global_batch_size, layout.dp * layout.microbatch_size
    found = split_problems(layout, question.architecture, question.workload.seq_len)
    found += ["ranks"] if layout.num_ranks != question.num_devices else []
    workload = question.workload
    optimizer = OptimizerSection(
        name=workload.optimizer, state_dtype=workload.optimizer_state_dtype, in_backward=workload.updates_in_backward
    )
    found += [*block_problems(optimizer, layout, question.architecture), *attention_layout_problems(layout)]
    found += memory_layout_problems(question.setup.memory, layout)
    backend, dtype = layout.attention_backend, workload.activation_dtype
    found += [*attention_model_problems(backend, question.architecture, dtype, workload.seq_len)]
    found += ["documents"] if backend == "flash" and workload.masks_documents else []
    found += ["device"] if device_problem(backend, dtype, is_cpu=False) is not None else []
    if batch % per_pass:
        return [*found, "batch"]
    found += update_problems(optimizer, layout, batch // per_pass)
    return [*found, *schedule_problems(layout, batch // per_pass)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_row_is_valid_where_no_rule_has_words_against_it(case: tuple[PlanRequest, Layout]) -> None:
    assert_is_valid_where_no_rule_has_words(case)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(cases())
def test_many_rows_are_valid_where_no_rule_has_words_against_them(case: tuple[PlanRequest, Layout]) -> None:
    assert_is_valid_where_no_rule_has_words(case)


def assert_is_valid_where_no_rule_has_words(case: tuple[PlanRequest, Layout]) -> None:
    question, layout = case
    assert is_valid(layout_table([layout]), question)[0] == (not problems(layout, question))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_is_invalid_has_a_reason(case: tuple[PlanRequest, Layout]) -> None:
    question, layout = case
    if not is_valid(layout_table([layout]), question)[0]:
        assert invalid_reason(layout, question)


@pytest.mark.parametrize(
    ("model", "layout", "is_right"),
    [
        # 4 blocks fill 6 stages, the first and the last without any.
        ("llama-1m", Layout(pp=6), True),
        ("llama-1m", Layout(pp=7), False),
        # 12 heads and 4 key heads: 3 ranks would each get whole query heads, but no whole key heads.
        ("llama-100m", Layout(cp=3, cp_method="ulysses"), False),
        ("llama-100m", Layout(cp=4, cp_method="ulysses"), True),
        ("llama-100m", Layout(cp=12, cp_method="ulysses"), True),
    ],
)
def test_rules_that_chance_seldom_meets(model: str, layout: Layout, is_right: bool) -> None:
    question = ask(model, 8, seq_len=24 * 7, batch=84)
    question = question.with_setup(cluster=question.cluster.model_copy(update={"num_devices": layout.num_ranks}))
    assert (problems(layout, question) == []) == is_right
    assert is_valid(layout_table([layout]), question)[0] == is_right


def test_experts_are_split_over_tp_only_where_that_divides_them() -> None:
    layout = Layout(tp=2, etp=2)
    for width, is_right in ((128, True), (129, False)):
        question = ask("moe-4m", 2, batch=4)
        assert isinstance(question.architecture, MoEArchitecture)
        question = replace(question, architecture=question.architecture.replace(expert_ffn_dim=width))
        assert (problems(layout, question) == []) == is_right
        assert is_valid(layout_table([layout]), question)[0] == is_right


def test_a_group_to_keep_parameters_on_needs_a_split_that_has_it() -> None:
    question = ask(num_devices=8, batch=8, reshard_after_forward=4)
    rows = layout_table([Layout(dp_shard=8), Layout(dp_shard=4, tp=2), Layout(dp_replicate=2, dp_shard=4)])
    assert is_valid(rows, question).tolist() == [True, False, False]


def test_stage_boundaries_that_are_set_fix_the_number_of_stages() -> None:
    question = ask(num_devices=8, batch=8, stage_boundaries=(8, 16, 24))
    rows = layout_table([Layout(pp=4, dp_shard=2), Layout(pp=2, dp_shard=4), Layout(dp_shard=8)])
    assert is_valid(rows, question).tolist() == [True, False, False]
