"""Days and cost of a whole run: the same from Python as from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.main import run
from meshwright.errors import ConfigError

MODEL: dict[str, Any] = {"model": "llama3.2-1b", "cluster": "h100-ib400:2", "seq_len": 2048, "global_batch_size": 16}
WORDS = ["--model", "llama3.2-1b", "--cluster", "h100-ib400:2", "--seq-len", "2048", "--global-batch-size", "16"]
WHOLE: dict[str, Any] = {
    "tokens": "1T",
    "price_per_gpu_hour": 2.5,
    "deadline_days": 60.0,
    "failures_per_gpu_day": 1e-3,
    "restart_minutes": 30.0,
}
OF_WHOLE = [
    *("--tokens", "1T", "--price-per-gpu-hour", "2.5", "--deadline", "60d"),
    *("--failures-per-gpu-day", "1e-3", "--restart-minutes", "30"),
]


def test_python_has_what_the_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = mw.plan(**MODEL, **WHOLE, frontier=True)
    assert plan.budget is not None
    assert plan.budget.cost == pytest.approx(2.5 * plan.budget.device_hours)
    assert plan.budget.is_deadline_satisfied is (plan.budget.days <= 60)
    assert len({one.num_devices for one in plan.budgets[1:]}) > 2
    assert run(["plan", *WORDS, *OF_WHOLE, "--frontier", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(plan.to_json())
    assert record["budget"] == plan.budget.to_dict()
    assert run(["plan", *WORDS, *OF_WHOLE, "--frontier"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plan.table(width=80)
    assert "1T tokens: " in plan.table()
    plan.to_html(tmp_path / "plan.html")
    assert "Time and cost of the run" in (tmp_path / "plan.html").read_text()


def test_without_tokens_there_is_no_budget() -> None:
    plan = mw.plan(**MODEL)
    assert (plan.budget, plan.budgets) == (None, ())
    assert "budget" not in json.loads(plan.to_json())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deadline_days": 60.0}, "deadline_days needs tokens"),
        ({"tokens": "1T", "deadline_days": 0.0}, "deadline_days = 0.0 must be more than 0"),
        ({"tokens": "1T", "price_per_gpu_hour": float("nan")}, "price_per_gpu_hour = nan must be a finite number"),
        ({"tokens": "1T", "restart_minutes": -1.0}, "restart_minutes = -1.0 must be 0 or more"),
    ],
)
def test_what_cannot_be_asked_is_named_as_python_does(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mw.plan(**MODEL, **arguments)


def test_the_jobs_rate_of_failures_is_that_of_the_plan() -> None:
    rate, tokens = "cluster.failures_per_device_day=0.02", {"tokens": "1T"}
    by_job, by_option = mw.plan(rate, **MODEL, **tokens), mw.plan(**MODEL, **tokens, failures_per_gpu_day=0.02)
    assert by_job.budget == by_option.budget
    assert by_job.budget.mtbf_s == pytest.approx(86_400 / 2 / 0.02)
    both = mw.plan(rate, **MODEL, **tokens, failures_per_gpu_day=0.0)
    assert both.budget.mtbf_s is None


def test_a_plan_says_after_how_many_steps_auto_would_save() -> None:
    keys = ("checkpoint.interval=auto", "cluster.failures_per_device_day=0.02")
    plan = mw.plan(*keys, **MODEL, tokens="1T")
    steps = round(plan.budget.checkpoint_interval_s / plan.pick.step_s)
    assert f'checkpoint.interval = "auto": every {steps} steps' in plan.note
    assert "the run chooses by what it measures" in " ".join(plan.table().split())


def test_a_check_says_the_same_of_the_jobs_own_layout(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\nsource = "llama3.2-1b"\n[checkpoint]\ninterval = "auto"\n'
        '[cluster]\nname = "h100-ib400"\nnum_devices = 8\n[layout]\ndp_shard = 8\n[train]\nglobal_batch_size = 64\n',
        encoding="utf-8",
    )
    lines = dict(mw.check(tmp_path / "job.toml").lines)
    assert "as often as failures make best" in lines["run"]
    assert lines["saves"].startswith('checkpoint.interval = "auto": every ')
    assert (
        "at the end only" in dict(mw.check(tmp_path / "job.toml", "cluster.failures_per_device_day=0").lines)["saves"]
    )
