"""The rules on arrays and the rules in words are the same rules."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.layout_table import layout_table
from meshwright.planner.question import Question
from meshwright.planner.refused import invalid_reason
from meshwright.planner.rules import is_valid
from meshwright.spec.layout import SCHEDULES, Layout
from meshwright.spec.schedule_rules import schedule_problems
from meshwright.spec.validity import split_problems
from questions import ask

DEGREES = st.sampled_from((1, 1, 1, 2, 2, 3, 4, 8))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp, tp = draw(DEGREES), draw(DEGREES)
    schedule = draw(st.sampled_from(SCHEDULES))
    return Layout(
        pp=pp,
        dp_replicate=draw(st.sampled_from((1, 1, 2))),
        dp_shard=draw(DEGREES),
        cp=draw(DEGREES),
        tp=tp,
        ep=draw(st.sampled_from((1, 1, 2, 4, 16))),
        etp=draw(st.sampled_from((1, 1, tp, 2))),
        microbatch_size=draw(st.sampled_from((1, 1, 2, 3, 4))),
        schedule=schedule,
        virtual_stages=draw(st.sampled_from((1, 2, 3, 12))) if draw(st.booleans()) else None,
        cp_method=draw(st.sampled_from(("all-gather", "ring", "ulysses"))),
        async_tp=draw(st.sampled_from((False, False, True))),
        activation_checkpoint=draw(st.sampled_from(("none", "selective", "full"))),
        activation_checkpoint_every=draw(st.sampled_from((1, 1, 2))),
        reshard_after_forward=draw(st.sampled_from(("always", "never"))),
        compile=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Question, Layout]:
    layout = draw(layouts())
    model = draw(st.sampled_from(("llama-1m", "llama3-8b", "llama3-70b", "moe-4m", "mla-moe-4m")))
    seq_len = draw(st.sampled_from((96, 1024, 4096)))
    batch = draw(st.sampled_from((7, 16, 24, 96)))
    nodes = math.lcm(8, layout.num_ranks) if draw(st.integers(0, 9)) == 0 else layout.num_ranks
    question = ask(model, 8, seq_len=seq_len, batch=batch)
    return question.with_setting(cluster=question.cluster.model_copy(update={"num_devices": nodes})), layout


def problems(layout: Layout, question: Question) -> list[str]:
    """Return what the rules in words say, the way the checks of a job put them together."""
    batch, per_pass = question.workload.global_batch_size, layout.dp * layout.microbatch_size
    found = split_problems(layout, question.architecture, question.workload.seq_len)
    found += ["ranks"] if layout.num_ranks != question.num_devices else []
    return found + (["batch"] if batch % per_pass else schedule_problems(layout, batch // per_pass))


@settings(max_examples=600, deadline=None)
@given(cases())
def test_a_row_is_valid_where_no_rule_has_words_against_it(case: tuple[Question, Layout]) -> None:
    question, layout = case
    assert is_valid(layout_table([layout]), question)[0] == (not problems(layout, question))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_is_invalid_has_a_reason(case: tuple[Question, Layout]) -> None:
    question, layout = case
    if not is_valid(layout_table([layout]), question)[0]:
        assert invalid_reason(layout, question)


def test_a_group_to_keep_parameters_on_needs_a_split_that_has_it() -> None:
    question = ask(num_devices=8, batch=8, reshard_after_forward=4)
    rows = layout_table([Layout(dp_shard=8), Layout(dp_shard=4, tp=2), Layout(dp_replicate=2, dp_shard=4)])
    assert is_valid(rows, question).tolist() == [True, False, False]


def test_stage_boundaries_that_are_set_fix_the_number_of_stages() -> None:
    question = ask(num_devices=8, batch=8, stage_boundaries=(8, 16, 24))
    rows = layout_table([Layout(pp=4, dp_shard=2), Layout(pp=2, dp_shard=4), Layout(dp_shard=8)])
    assert is_valid(rows, question).tolist() == [True, False, False]
