"""What a page says of other values of a key and of other splits is what a plan says that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.planner.plan import make_plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import SPLIT_KEYS
from meshwright.spec.run.layout_plan import Candidate, Plan
from questions import ask

TOLERANCE = 0.01
"""Share of a step: a plan that keeps a key plays more pipelines of its kind than one that compares all kinds."""

QUESTIONS: dict[str, dict[str, Any]] = {
    "small on slow links": {"model": "llama3.2-1b", "num_devices": 24, "seq_len": 4096, "batch": 96},
    "8b on 16": {"model": "llama3-8b", "num_devices": 16, "seq_len": 4096, "batch": 64},
    "mixture on 16": {"model": "mixtral-8x7b", "num_devices": 16, "seq_len": 4096, "batch": 64},
}
CLUSTERS = {"small on slow links": "h100-tcpx"}


def question(name: str, **fixed: Any) -> PlanRequest:
    return ask(**QUESTIONS[name], cluster=CLUSTERS.get(name, "h100-ib400"), **fixed)


def alternatives_of(plan: Plan) -> Iterator[tuple[dict[str, Any], Candidate]]:
    """Yield keys to keep, and the layout that the page calls the best with them."""
    for contrast in plan.alternatives:
        keys = [change.partition("=")[0] for change in contrast.change.split(", ")]
        given = dict(change.split("=") for change in contrast.change.split(", "))
        words = {"reshard_after_forward", "gradient_sync"}
        yield {key: given[key] if key in words else getattr(contrast.other.layout, key) for key in keys}, contrast.other
    for runner in plan.runners_up:
        yield {key: getattr(runner.layout, key) for key in SPLIT_KEYS}, runner


@pytest.mark.long
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_best_of_each_kind_is_what_a_plan_finds_that_keeps_the_key(name: str) -> None:
    for kept, other in alternatives_of(make_plan(question(name), num_runners_up=5)):
        best = make_plan(question(name, **kept), num_runners_up=0, min_scored=0).fastest
        assert _total_s(other) == pytest.approx(_total_s(best), rel=TOLERANCE), kept


def test_a_key_that_does_nothing_costs_nothing() -> None:
    # All of a rank's sequences fit in one microbatch: there is one reduction either way.
    asked = ask("llama3.2-1b", 8, seq_len=2048, batch=16, dp_shard=8)
    plan = make_plan(asked, min_scored=0)
    assert plan.pick.layout.microbatch_size == 2
    changes = {contrast.change: contrast.other for contrast in plan.alternatives}
    assert _total_s(changes["gradient_sync=step"]) <= _total_s(plan.pick)


def _total_s(candidate: Candidate) -> float:
    return candidate.estimate.step.total_s
