"""The table of layouts: everything in it is valid, and whatever the menu offers and is valid is in it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.errors import UnsupportedError
from meshwright.planner.candidate import layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import divisors, menu_of
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import is_needless, layout_space, splits
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from questions import ask

QUESTIONS = (
    ask("llama-1m", 8, seq_len=512, batch=16),
    ask("moe-4m", 8, seq_len=512, batch=8),
    ask("llama3-8b", 6, seq_len=768, batch=12),
    ask("llama3-8b", 4, seq_len=1024, batch=8, schedule="Interleaved1F1B", pp=2),
)
FACTORS = {4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}


@cache
def space(place: int) -> LayoutTable:
    """Return the table of one of QUESTIONS."""
    return layout_space(QUESTIONS[place], menu_of(QUESTIONS[place]))


def keys(table: LayoutTable) -> set[tuple[int, ...]]:
    return set(map(tuple, np.stack([column.astype(int) for column in table.columns().values()], axis=1).tolist()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(QUESTIONS), st.randoms(use_true_random=False))
def test_no_layout_of_the_table_has_problems(question: PlanRequest, random: object) -> None:
    table = space(QUESTIONS.index(question))
    row = random.randrange(len(table))  # type: ignore[attr-defined]
    layout = layout_at(table, row, question)
    assert split_problems(layout, question.architecture, question.workload.seq_len) == []
    assert layout.num_ranks == question.num_devices
    assert question.workload.global_batch_size % (layout.dp * layout.microbatch_size) == 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_layout_is_in_the_table_twice(question: PlanRequest) -> None:
    assert len(keys(space(QUESTIONS.index(question)))) == len(space(QUESTIONS.index(question)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(QUESTIONS))
def test_a_valid_layout_of_the_menu_is_in_the_table(data: st.DataObject, question: PlanRequest) -> None:
    menu = menu_of(question)
    degrees = dict.fromkeys(("tp", "cp", "pp", "dp_shard", "dp_replicate"), 1)
    for factor in FACTORS[question.num_devices]:
        degrees[data.draw(st.sampled_from(list(degrees)))] *= factor
    schedule, number = data.draw(st.sampled_from(menu.pipelines))
    schedule = schedule if degrees["pp"] > 1 else question.fixed.get("schedule", "1F1B")
    may_free = degrees["pp"] == 1 or schedule not in SPLIT_BACKWARD_SCHEDULES
    policy = data.draw(st.sampled_from(menu.activation_checkpoint))
    layout = Layout(
        **degrees,
        ep=data.draw(st.sampled_from(menu.ep[:3])),
        etp=data.draw(st.sampled_from((1, 1, degrees["tp"]))) if len(menu.etp) > 1 else 1,
        microbatch_size=data.draw(st.sampled_from(menu.microbatch_size[:2])),
        schedule=schedule,
        virtual_stages=number if degrees["pp"] > 1 else 1,
        cp_method=data.draw(st.sampled_from(menu.cp_method)),
        reshard_after_forward="always" if may_free and data.draw(st.sampled_from(menu.is_resharded)) else "never",
        gradient_sync=data.draw(st.sampled_from(("auto", "step", "microbatch"))),
        async_tp=degrees["tp"] > 1 and data.draw(st.sampled_from(menu.async_tp)),
        activation_checkpoint=policy,
        activation_checkpoint_every=1 if policy == "none" else data.draw(st.sampled_from((1, 2, 3, 4))),
        compile=menu.compile[0] and may_free,
        compile_loss=menu.compile_loss,
    )
    # Without context parallelism its methods are one.
    layout = layout.replace(cp_method="all-gather") if layout.cp == 1 else layout
    row = layout_table([layout])
    is_asked = all(getattr(layout, key) == value for key, value in question.fixed.items())
    is_asked = is_asked and all(degree in getattr(menu, axis) for axis, degree in degrees.items())
    if is_asked and is_valid(row, question)[0] and not is_needless(row, question, menu)[0]:
        assert keys(row) <= keys(space(QUESTIONS.index(question)))


def test_what_is_set_is_kept() -> None:
    question = ask(num_devices=8, tp=2, activation_checkpoint="full", compile=False, virtual_stages=3)
    table = layout_space(question, menu_of(question))
    assert len(table)
    assert set(table.tp.tolist()) == {2}
    assert set(table.activation_checkpoint.tolist()) == {2}
    assert not table.compile.any()
    assert set(table.stages_per_rank.tolist()) == {3}


def test_what_a_table_has_no_column_for_is_put_back_into_the_layout() -> None:
    question = ask(num_devices=8, batch=8, prefetch=2, reshard_after_forward=4)
    table = layout_space(question, menu_of(question))
    layout = layout_at(table, 0, question)
    assert (layout.prefetch, layout.reshard_after_forward) == (2, 4)


def test_a_layout_says_no_more_than_it_must() -> None:
    question = ask(num_devices=8, batch=8)
    flat = layout_at(layout_table([Layout(dp_shard=8, virtual_stages=1, reshard_after_forward="always")]), 0, question)
    assert flat == Layout(dp_shard=8)
    piped = layout_at(layout_table([Layout(pp=8, schedule="ZBVZeroBubble")]), 0, question)
    assert piped == Layout(pp=8, schedule="ZBVZeroBubble")


def test_a_host_has_no_symmetric_memory_and_does_not_compile() -> None:
    question = ask("llama-1m", 2, seq_len=256, batch=8)
    device = question.cluster.device.replace(is_host=True)
    menu = menu_of(question.with_setup(cluster=question.cluster.replace(device=device)))
    assert (menu.async_tp, menu.compile) == ((False,), (False,))


def test_tensor_parallelism_stays_inside_what_links_join_directly_unless_asked() -> None:
    assert max(menu_of(ask("llama3-70b", 64)).tp) == 8
    assert menu_of(ask("llama3-70b", 64, tp=16)).tp == (16,)


def test_a_schedule_from_a_file_cannot_be_searched_around() -> None:
    with pytest.raises(UnsupportedError, match=r"layout.schedule = \"mine.csv\" is a file.*without layout.search"):
        menu_of(ask(schedule="mine.csv"))


def test_all_forwards_first_only_where_turns_cannot_be_taken() -> None:
    question = ask("llama3-8b", 8, batch=16)
    rows = [
        Layout(pp=4, dp_shard=2, schedule="GPipe"),
        Layout(pp=4, dp_shard=2, schedule="GPipe", microbatch_size=4),  # two microbatches are too few for 1F1B
        Layout(pp=4, dp_shard=2, schedule="LoopedBFS"),
        Layout(pp=4, dp_shard=2),
        Layout(dp_shard=8, schedule="GPipe"),
    ]
    assert is_needless(layout_table(rows), question, menu_of(question)).tolist() == [True, False, True, False, False]
    fixed = ask("llama3-8b", 8, batch=16, schedule="GPipe")
    assert not is_needless(layout_table(rows), fixed, menu_of(fixed)).any()


def test_divisors() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)


def test_splits_share_every_batch_evenly() -> None:
    question = ask(num_devices=16, batch=24)
    table = splits(question, menu_of(question))
    assert len(table)
    assert not (24 % (table.dp * table.microbatch_size)).any()
    assert len(splits(question, replace(menu_of(question), microbatch_size=(5,)))) == 0


def test_what_the_menu_has_no_choice_of_is_as_it_is_set() -> None:
    question = ask("llama3-8b", 8, batch=8, pp=1, tp=1, prefetch=0, reshard_after_forward=4)
    table = layout_space(question, menu_of(question))
    layouts = [table.layout(row) for row in range(len(table))]
    assert {(layout.prefetch, layout.reshard_after_forward) for layout in layouts} == {(0, 4)}
