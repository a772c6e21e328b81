"""activation_checkpoint = "auto" is priced as training would choose it, with the formulas' memory for a trace's."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.load import load_job
from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.recompute_choice import choose_recompute
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.price import memory_of_ranks
from meshwright.spec.layout.layout import Layout
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")
ON = ("cluster.name=h100-ib400", "layout.dp_shard=2", "layout.compile=blocks")
AUTO = (*ON, "layout.activation_checkpoint=auto")
MB = 1_000_000


def request_for(*overrides: str) -> PlanRequest:
    return plan_request(load_job(TINY, overrides), Options())


def tensor_bytes(layout: Layout, request: PlanRequest) -> list[int]:
    return [one.allocated_bytes - one.workspace_bytes for one in memory_of_ranks(layout, request)]


def test_no_more_is_recomputed_than_the_budget_needs() -> None:
    request = request_for(*ON)
    layout = Layout(dp_shard=2, microbatch_size=2, compile=True, activation_checkpoint="auto")
    none, full = (tensor_bytes(layout.replace(activation_checkpoint=kind), request)[0] for kind in ("none", "full"))
    assert choose_recompute(layout, request, none).layout.activation_checkpoint == "none"
    assert choose_recompute(layout, request, full).layout.activation_checkpoint == "full"
    between = choose_recompute(layout, request, (none + full) // 2)
    assert between.misfit is None
    assert tensor_bytes(between.layout, request)[0] <= (none + full) // 2
    steps = [
        judge(one, request).step_s
        for one in (
            layout.replace(activation_checkpoint="none"),
            between.layout,
            choose_recompute(layout, request, full).layout,
        )
    ]
    assert steps == sorted(set(steps)), "each of the three recomputes more than the one before"


def test_the_first_pipeline_rank_recomputes_most() -> None:
    request = request_for(*ON)
    layout = Layout(pp=2, microbatch_size=2, compile=True, activation_checkpoint="auto")
    ranks = [tensor_bytes(layout.replace(activation_checkpoint=kind), request) for kind in ("none", "full")]
    found = choose_recompute(layout, request, (max(ranks[0]) + max(ranks[1])) // 2).layout.activation_checkpoint_blocks
    assert found is not None
    assert found[2:].count("none") > found[:2].count("none")


def test_check_and_plan_price_the_same_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    budget = f"layout.memory_budget_bytes={30 * MB}"
    checked, planned = mw.check(TINY, *AUTO, budget, ranks=2), mw.plan(TINY, *AUTO, budget)
    notes = [text for label, text in checked.lines if label == "note" and "activation_checkpoint" in text]
    assert len(notes) == 1
    assert planned.note.endswith(notes[0])
    assert '"auto" is priced as 3 selective, 1 none, chosen by formulas' in notes[0]
    assert "`meshwright simulate` shows their choice" in notes[0]
    assert planned.given is not None
    assert planned.given.layout.activation_checkpoint_blocks == ("selective",) * 3 + ("none",)
    step = next(text for label, text in checked.lines if label == "step")
    assert step.startswith(f"{planned.given.step_s * 1e3:.1f} ms")


def test_a_budget_that_nothing_fits_in_is_a_misfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = mw.check(TINY, *AUTO, "layout.memory_budget_bytes=100000", ranks=2)
    assert isinstance(checked.misfit, InfeasibleLayout)
    assert "raise layout.memory_budget_bytes to" in str(checked.misfit)
    assert str(checked.misfit) == mw.plan(TINY, *AUTO, "layout.memory_budget_bytes=100000").given_misfit


def test_a_search_chooses_what_blocks_save_by_itself() -> None:
    keys = ("layout.search=true", "cluster.name=h100-ib400", "cluster.num_devices=2")
    free, auto = mw.plan(TINY, *keys), mw.plan(TINY, *keys, "layout.activation_checkpoint=auto")
    assert auto.pick == free.pick
    with pytest.raises(ConfigError, match=r"memory_budget_bytes = 5 bounds .* leave layout.memory_budget_bytes out"):
        mw.plan(TINY, *keys, "layout.activation_checkpoint=auto", "layout.memory_budget_bytes=5")
