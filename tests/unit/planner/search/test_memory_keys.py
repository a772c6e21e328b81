"""Keys that save memory are searched: one that is set by hand gives no faster plan, one of the pick no slower one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshwright.cost.stack_factors import load_stack
from meshwright.errors import InfeasibleLayout
from meshwright.planner.plan import find, make_plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import MEMORY_KEYS, memory_options, menu_of, without_memory_keys
from meshwright.planner.search.price import price
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layout_space
from meshwright.spec.run.layout_plan import Candidate
from questions import ask

QUESTIONS = {
    "8b, state does not fit": ask("llama3-8b", 8, seq_len=8192, batch=128, cluster="rtx-4090-eth100"),
    "8b, activations do not fit": ask("llama3-8b", 8, seq_len=8192, batch=32, cluster="l40s-eth100"),
    "8b, one device": ask("llama3-8b", 1, seq_len=4096, batch=8, cluster="h200-ib400"),
    "1b, all fits": ask("llama3.2-1b", 8, seq_len=4096, batch=32),
}
ON = {"cpu_offload": True, "activation_offload": True, "loss_chunks": 16}
SET_ALONE = ("pp", "tp", "microbatch_size", *MEMORY_KEYS)
_AS_FAST = 1.01


def quick(*names: str) -> list[Any]:
    """Return the questions, all but `names` as long tests."""
    return [pytest.param(name, marks=[] if name in names else [pytest.mark.long]) for name in QUESTIONS]


@cache
def pick(name: str) -> Candidate:
    return picked(QUESTIONS[name])


def picked(question: PlanRequest) -> Candidate:
    return make_plan(question, num_runners_up=0, min_scored=0).pick


@pytest.mark.slow
@pytest.mark.parametrize("name", quick("8b, one device"))
def test_a_memory_key_set_by_hand_gives_no_faster_plan(name: str) -> None:
    num_feasible = 0
    for key, value in ON.items():
        try:
            by_hand = picked(replace(QUESTIONS[name], fixed={key: value}))
        except InfeasibleLayout:
            continue
        num_feasible += 1
        assert pick(name).step_s <= by_hand.step_s * _AS_FAST, key
    assert num_feasible


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_setting_a_key_of_the_pick_gives_no_slower_plan(name: str) -> None:
    for key in SET_ALONE:
        value = getattr(pick(name).layout, key)
        again = picked(replace(QUESTIONS[name], fixed={key: value}))
        assert again.step_s <= pick(name).step_s * (1 + 1e-9), f"{key}={value}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param("8b, state does not fit", {"cpu_offload"}, marks=pytest.mark.long),
        ("8b, activations do not fit", {"activation_offload"}),
        ("8b, one device", {"cpu_offload"}),
        pytest.param("1b, all fits", set(), marks=pytest.mark.long),
    ],
)
def test_where_a_key_lets_in_a_faster_layout_it_is_picked(name: str, keys: set[str]) -> None:
    layout = pick(name).layout
    assert {key for key in ("cpu_offload", "activation_offload") if getattr(layout, key)} >= keys


@pytest.mark.long
@pytest.mark.slow
def test_a_key_that_lets_in_a_faster_layout_saves_time() -> None:
    without = replace(QUESTIONS["8b, state does not fit"], fixed={"cpu_offload": False})
    assert picked(without).step_s > 1.2 * pick("8b, state does not fit").step_s


@pytest.mark.slow
def test_the_fastest_of_all_with_their_memory_keys_is_found_without_scoring_all() -> None:
    question = ask("llama3-8b", 4, seq_len=4096, batch=16, cluster="l40s-eth100")
    every = price(layout_space(question, menu_of(question)), question)
    found = find(question, min_scored=0)
    assert found.num_scored < len(layout_space(question, menu_of(question)))
    assert (found.priced.headroom_bytes >= question.margin_bytes).all()
    assert found.priced.total_s.min() <= every.total_s.min() * 1.002
    plain = search(question, without_memory_keys(menu_of(question)), min_scored=0)
    assert found.priced.total_s.min() < plain.priced.total_s.min(initial=np.inf)


@pytest.mark.slow
def test_other_software_offloads_only_where_nothing_fits_without() -> None:
    question = QUESTIONS["8b, activations do not fit"].with_setup(stack=load_stack("torchtitan-2025"))
    layouts = find(question, min_scored=0).priced.layouts
    assert not (layouts.cpu_offload | layouts.activation_offload).any()
    assert (layouts.loss_chunks == 1).all()
    tight = QUESTIONS["8b, one device"].with_setup(stack=load_stack("torchtitan-2025"))
    assert find(tight, min_scored=0).priced.layouts.cpu_offload.all()


def test_options_begin_with_none_of_the_keys_and_end_with_all() -> None:
    options = memory_options(menu_of(QUESTIONS["1b, all fits"]))
    assert options[0] == {"cpu_offload": False, "activation_offload": False, "loss_chunks": 1}
    assert options[-1] == ON
    assert len(options) == 8
    fixed = memory_options(menu_of(replace(QUESTIONS["1b, all fits"], fixed={"loss_chunks": 4, "cpu_offload": False})))
    assert fixed == [{**options[0], "loss_chunks": 4}, {**options[0], "loss_chunks": 4, "activation_offload": True}]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("num_devices", [2, 16])
def test_the_loss_is_compiled_next_to_compiled_blocks(num_devices: int) -> None:
    question = ask("llama3.2-1b", num_devices, cluster="rtx-4090-eth100", seq_len=2048, batch=8 * num_devices)
    picks = {
        name: make_plan(replace(question, fixed=fixed), min_scored=0).pick
        for name, fixed in {"free": {}, "eager": {"compile": False}, "whole": {"compile_loss": False}}.items()
    }
    assert {name: pick.layout.compile_loss for name, pick in picks.items()} == {
        "free": True,
        "eager": False,
        "whole": False,
    }
    steps_s = {name: pick.estimate.step.total_s for name, pick in picks.items()}
    assert steps_s["free"] < 0.97 * min(steps_s["eager"], steps_s["whole"])
