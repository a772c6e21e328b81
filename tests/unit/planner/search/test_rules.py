"""The rules on arrays and the rules in words are the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.layout_table import layout_table
from meshwright.planner.explain.layout_rules import invalid_reason
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.rules import is_valid
from meshwright.spec.job.job import Job
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.validity import broken_rules
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.adapter import Adapter
from meshwright.spec.step.workload import FLOAT8_PRECISIONS
from questions import ask

SMALL = st.sampled_from((1, 1, 1, 2, 2, 3, 4))
OPTIMIZERS = (
    *[("adamw", "float32", False)] * 6,
    ("muon", "bfloat16", False),
    ("adamw", "int8", False),
    ("adamw", "bfloat16", True),
)

PRECISIONS = (*("bfloat16", "float32") * 3, "float8-tensorwise", "float8-rowwise", "mxfp8")
POOLS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"embedding": "uvm"},
    {"optimizer_state": "uvm"},
    {"communication": "nccl"},
)


ODD: tuple[dict[str, Any], ...] = (
    *[{}] * 3,
    {"compile": "model"},
    {"cuda_graphs": True},
    {"compile_optimizer": True},
    {"separate_reduce_group": True},
    {"communication_sms": 8},
    {"cpu_offload": True},
    {"activation_offload": True},
    {"async_tp": True},
    {"loss_chunks": 16},
    {"gradient_sync": "step"},
    {"activation_checkpoint": "full"},
    {"reshard_after_forward": "never"},
)
"""Keys that each rule out much else."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout that breaks few rules: most choices are usual ones, and two may be odd ones."""
    odd = draw(st.sampled_from(ODD)) | draw(st.sampled_from(ODD))
    usual = draw(st.sampled_from((Layout(), Layout(dp_shard=4), None)))
    return (draw(wide_layouts()) if usual is None else usual.replace(compile=draw(st.booleans()))).replace(**odd)


@st.composite
def wide_layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of any degrees."""
    pp, tp = draw(SMALL), draw(st.sampled_from((1, 1, 2, 4, 8, 16, 3)))
    schedule = draw(st.sampled_from(SCHEDULES))
    is_split = schedule in SPLIT_BACKWARD_SCHEDULES
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
        activation_checkpoint=draw(st.sampled_from(("none", "selective", "full"))),
        activation_checkpoint_every=draw(st.sampled_from((1, 1, 1, 2))),
        reshard_after_forward=draw(st.sampled_from(("never", "never", "always") if is_split else ("never", "always"))),
        compile=draw(st.booleans()),
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
    kept |= {"masks_documents": draw(st.booleans()), "precision": draw(st.sampled_from(PRECISIONS))}
    memory = draw(st.sampled_from(POOLS))
    question = question.with_setup(workload=question.workload.replace(**kept), memory=MemorySection.from_dict(memory))
    num_ranks = layout.num_ranks if draw(st.integers(0, 9)) else layout.num_ranks + 8
    return question.with_setup(cluster=question.cluster.model_copy(update={"num_devices": num_ranks})), layout


def problems(layout: Layout, question: PlanRequest) -> list[str]:
    """Return what the check of a job says of the same question."""
    ranks = ["ranks"] if layout.num_ranks != question.num_devices else []
    return [*ranks, *broken_rules(job_of(question), layout)]


def job_of(question: PlanRequest) -> Job:
    """Return the job that asks `question`, as far as a layout's rules read it."""
    workload, recipes = question.workload, {precision: recipe for recipe, precision in FLOAT8_PRECISIONS.items()}
    optimizer = {
        "name": workload.optimizer,
        "state_dtype": workload.optimizer_state_dtype,
        "in_backward": workload.updates_in_backward,
    }
    changed = {}
    if question.architecture != PRESETS[question.model_name]:
        assert isinstance(question.architecture, MoEArchitecture)
        changed = {"expert_ffn_dim": question.architecture.expert_ffn_dim}
    return Job.from_dict(
        {
            "model": {"source": question.model_name, "options": changed},
            "train": {"seq_len": workload.seq_len, "global_batch_size": workload.global_batch_size},
            "precision": {"compute": workload.activation_dtype, "float8": recipes.get(workload.precision, "none")},
            "optimizer": optimizer,
            "data": {"mask_documents": workload.masks_documents},
            "memory": question.setup.memory.to_dict(),
            "run": {"device": "cuda"},
        }
    )


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


@pytest.mark.slow
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


@pytest.mark.parametrize(("tp", "is_right"), [(2, True), (4, False)])
def test_blocks_of_a_base_in_few_bits_stay_whole(tp: int, is_right: bool) -> None:
    question, layout = ask("llama-1m", tp, seq_len=64, batch=8), Layout(tp=tp)
    adapter = Adapter(kind="lora", base_dtype="nf4")
    question = question.with_setup(workload=question.workload.replace(adapter=adapter))
    assert is_valid(layout_table([layout]), question)[0] == is_right
    assert is_right or "blocks of 64 inputs" in str(invalid_reason(layout, question))
