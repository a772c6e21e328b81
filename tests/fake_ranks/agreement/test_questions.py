"""What plans promise of validation/questions.csv is what their own programs do when they are simulated."""

from __future__ import annotations

from functools import cache

import pytest

from compiler_warnings import COMPILER_WARNINGS
from meshwright.config.load import load_job
from meshwright.prover.prove import ProofRequest, on_few_ranks, prove
from meshwright.spec.layout.layout_text import layout_text, parse_layout
from meshwright.spec.run.layout_plan import Candidate, SimulatedStep
from repository import ROOT
from validation.questions import (
    Asked,
    ask,
    differences,
    is_same_order,
    problems_of,
    read_questions,
    simulate_within,
)

QUESTIONS = {question.name: question for question in read_questions()}
QUICK = ("15m-h100-2-8m",)
"""Questions whose pick is traced in seconds."""
COMPARED = ("15m-h100-2", "moe-4m-h100-4", "100m-h100-8", "600m-h100-4", "1b-h100-1", "1b-4090-8")
"""Questions whose pick is traced and simulated within 20 s."""
NOT_COMPARED = ("405b-gb200-576", "q235-b200-64", "ds-h100-2048")
"""Questions whose pick takes more than 90 s to trace on two cores."""
LIMIT_S = 1500.0


@cache
def asked(name: str) -> Asked:
    return ask(QUESTIONS[name])


@cache
def simulated(name: str, place: int) -> SimulatedStep:
    """Return the step of one of a question's finalists, the pick first."""
    one = asked(name)
    return simulate_within(LIMIT_S, one.steps, one.finalists[place].layout).step


def assert_agree(name: str) -> None:
    assert not differences(asked(name), simulated(name, 0))


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_pick_is_valid_fits_and_does_what_was_planned(name: str) -> None:
    assert not problems_of(asked(name))
    assert_agree(name)


@pytest.mark.long
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_pick_is_valid_and_fits_on_every_pipeline_rank(name: str) -> None:
    assert not problems_of(asked(name))


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", COMPARED)
def test_small_picks_do_what_was_planned(name: str) -> None:
    assert_agree(name)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", [name for name in QUESTIONS if name not in (*QUICK, *COMPARED)])
def test_every_other_pick_is_traced_and_does_what_was_planned(name: str) -> None:
    step = simulated(name, 0)
    assert step.step_s is not None, step.problem
    if name not in NOT_COMPARED:
        assert_agree(name)


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("name", [*QUICK, *COMPARED])
def test_finalists_stand_in_the_same_order_when_simulated(name: str) -> None:
    steps = [simulated(name, place) for place in range(len(asked(name).finalists))]
    assert is_same_order(asked(name).finalists, steps)


def test_an_order_counts_where_planned_steps_are_apart() -> None:
    pick = asked(QUICK[0]).plan.pick
    slower = pick.replace(estimate=_slower(pick, 1.2))
    close = pick.replace(estimate=_slower(pick, 1.01))
    fast, slow = (SimulatedStep(step_s=seconds, reserved_bytes=(1,)) for seconds in (1.0, 2.0))
    assert is_same_order([pick, slower], [fast, slow])
    assert not is_same_order([pick, slower], [slow, fast])
    assert is_same_order([pick, close], [slow, fast])


def _slower(candidate: Candidate, factor: float) -> object:
    step = candidate.estimate.step
    extra_s = (factor - 1) * step.total_s
    return candidate.estimate.replace(step=step.replace(pipeline_bubble_s=step.pipeline_bubble_s + extra_s))


@pytest.mark.long
@COMPILER_WARNINGS
@pytest.mark.timeout(LIMIT_S)
def test_a_small_form_of_each_shape_trains_as_one_process() -> None:
    picks = {layout_text(on_few_ranks(asked(name).plan.pick.layout)) for name in QUESTIONS}
    dense = sorted(text for text in picks if "ep=" not in text)
    experts = sorted(text for text in picks if "ep=" in text)
    for model, texts in (("tiny.toml", dense), ("tiny-moe.toml", experts)):
        job = load_job(ROOT / "examples" / model).job
        proof = prove(ProofRequest(job, [parse_layout(text) for text in texts], num_steps=2), lambda _: None)
        assert proof.holds, [one.problem for one in proof.layouts if not one.holds]
