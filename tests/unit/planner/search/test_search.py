"""The search finds what pricing every layout would find, and never what does not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright.cost.layout_table import Bools, LayoutTable, layout_table
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import bounds_of
from meshwright.planner.search.finalists import finalists
from meshwright.planner.search.menu import menu_of, without_memory_keys
from meshwright.planner.search.price import Priced, price
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layout_space, splits
from meshwright.spec.layout.layout import Layout
from questions import ask

QUESTIONS = {
    "8b on 8": ask("llama3-8b", 8, seq_len=2048, batch=8),
    "8b on 16, long": ask("llama3-8b", 16, seq_len=32_768, batch=4),
    "70b on 32": ask("llama3-70b", 32, seq_len=4096, batch=16),
    "mixture on 16": ask("mixtral-8x7b", 16, seq_len=2048, batch=8),
    "8b on 8, with async_tp alone": ask(
        "llama3-8b", 8, seq_len=24_576, batch=16, tp=2, dp_shard=4, activation_checkpoint="none"
    ),
    "8b on 8, set": ask("llama3-8b", 8, seq_len=2048, batch=8, pp=2, activation_checkpoint="full"),
}


# The largest tables: 4 s to price.
LONG = ("70b on 32", "mixture on 16")
CASES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in QUESTIONS]


@cache
def everything(name: str) -> Priced:
    """Return every layout of a question without memory keys, priced, those that do not fit too."""
    question = QUESTIONS[name]
    return price(layout_space(question, without_memory_keys(menu_of(question))), question, only_fitting=False)


def fits(priced: Priced, question: PlanRequest) -> Bools:
    """Return which layouts leave the margin free."""
    return np.asarray(priced.headroom_bytes >= question.margin_bytes)


KEY = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "etp",
    "microbatch_size",
    "activation_checkpoint",
    "is_resharded",
    "reduces_each_microbatch",
)


def key_of(layouts: LayoutTable) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(layouts, name).tolist() for name in KEY), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_fastest_of_all_is_found_without_scoring_all(name: str) -> None:
    question, every = QUESTIONS[name], everything(name)
    found = search(question, menu_of(question), min_scored=0)
    assert found.num_scored <= len(every)
    assert (found.priced.headroom_bytes >= question.margin_bytes).all()
    assert found.priced.total_s.min() <= every.total_s[fits(every, question)].min() * 1.002


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_fits_has_a_bound_and_none_is_faster(name: str) -> None:
    question, every = QUESTIONS[name], everything(name)
    bounds = bounds_of(splits(question, menu_of(question)), question, menu_of(question))
    bound_of = dict(zip(key_of(bounds.layouts), bounds.least_s, strict=True))
    fitting = every.take(fits(every, question))
    seconds = np.array([bound_of[key] for key in key_of(fitting.layouts)])
    assert (fitting.total_s >= seconds * 0.99).all()


@pytest.mark.slow
def test_a_search_goes_on_to_as_many_layouts_as_are_wanted() -> None:
    question = QUESTIONS["mixture on 16"]
    few, many = (search(question, menu_of(question), min_scored=number) for number in (0, 10**9))
    assert few.num_scored < many.num_scored
    assert few.priced.total_s.min() == pytest.approx(many.priced.total_s.min())


def test_what_fits_nowhere_leaves_an_empty_table() -> None:
    question = ask("llama3.1-405b", 8)
    found = search(question, menu_of(question))
    assert len(found.priced) == 0


@pytest.mark.slow
def test_finalists_are_in_the_order_of_their_replayed_steps_and_differ() -> None:
    question = QUESTIONS["70b on 32"]
    best = finalists(search(question, menu_of(question)).priced, question)
    steps = [finalist.candidate.estimate.step.total_s for finalist in best]
    assert steps == sorted(steps)
    assert len({finalist.row for finalist in best}) == len(best) > 5


def test_of_equally_fast_layouts_the_one_that_leaves_more_memory_is_first() -> None:
    question = QUESTIONS["8b on 8"]
    twice = price(layout_table([Layout(dp_shard=8, activation_checkpoint="full")] * 2), question)
    lean = replace(twice, headroom_bytes=np.array([1.0, 2.0]))
    assert lean.by_time.tolist() == [1, 0]


def test_blocks_that_are_compiled_take_less_time() -> None:
    question = QUESTIONS["8b on 8"]
    layouts = [Layout(dp_shard=8, activation_checkpoint="full", compile=compile) for compile in (False, True)]
    eager, compiled = price(layout_table(layouts), question).total_s
    assert compiled < eager
