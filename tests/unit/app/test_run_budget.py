"""Days and cost of a whole run: the same from Python as from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.main import run
from meshwright.errors import ConfigError

MODEL: dict[str, Any] = {"model": "llama3.2-1b", "cluster": "h100-ib400:8", "seq_len": 2048, "global_batch_size": 64}
WORDS = ["--model", "llama3.2-1b", "--cluster", "h100-ib400:8", "--seq-len", "2048", "--global-batch-size", "64"]
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
