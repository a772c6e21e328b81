"""`meshwright report` of a run without a finished step shows where its time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.app.reports.report import goodput_only
from meshwright.cli.verbs.reports.report import command
from meshwright.errors import ConfigError
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event
from written_runs import write_run


def stepless(folder: Path) -> Path:
    run = Run(write_run(folder, []))
    append_event(run, "launched", time_s=10.0)
    append_event(run, "hang", time_s=40.0, duration_s=24.0)
    append_event(run, "ended", time_s=40.0)
    return run.folder


def test_the_command_says_that_there_is_no_step_and_where_the_time_went(tmp_path: Path) -> None:
    folder = stepless(tmp_path / "run")
    shown = CliRunner().invoke(command, [str(folder)])
    assert shown.exit_code == 0
    assert "no step was finished" in " ".join(shown.output.split())
    assert any(line.split() == ["hangs", "24", "s", "80.0", "%"] for line in shown.output.splitlines())
    record = json.loads(CliRunner().invoke(command, [str(folder), "--json"]).output)
    assert record["num_steps"] == 0
    assert record["goodput"]["start_up_s"] == pytest.approx(6.0)


def test_a_run_with_steps_is_reported_by_them(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens_per_s": 1.0, "step_ms": 1.0}
    assert goodput_only(write_run(tmp_path / "run", [row | {"memory_bytes": 1, "attempt": 1}])) is None


def test_a_run_that_says_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished step"):
        goodput_only(write_run(tmp_path / "run", []))
