"""Pages of training runs: what a run measured as HTML, and two runs side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.app.reports.compare import RunComparisonResult, compare
from meshwright.app.reports.report import report
from meshwright.errors import ConfigError
from meshwright.pages.figures.run_figures import measured_waterfall_figure
from meshwright.pages.html.run_html import write_run_html
from meshwright.pages.tables.run_table import run_comparison_page
from meshwright.spec.run.run_comparison import RunComparison
from written_runs import JOB, write_run


def steps(num_steps: int, loss: float = 4.0, attempt: int = 2) -> list[dict[str, Any]]:
    """Return rows of metrics whose loss falls by a hundredth a step."""
    return [
        {
            "step": step,
            "loss": loss - step / 100,
            "grad_norm": 1.5,
            "learning_rate": 1e-3,
            "tokens_per_s": 1000.0,
            "step_ms": 100.0,
            "memory_bytes": 2**30,
            "attempt": attempt,
        }
        for step in range(1, num_steps + 1)
    ]


def test_two_runs_are_drawn_as_curves_next_to_each_other(tmp_path: Path) -> None:
    found = compare(write_run(tmp_path / "a", steps(20)), write_run(tmp_path / "b", steps(9, loss=5.0)))
    assert isinstance(found, RunComparisonResult)
    assert found.plots[:2] == ("loss", "grad_norm")
    a, b = found.plot("loss").data
    assert ((a.name, len(a.y)), (b.name, len(b.y))) == (("A", 20), ("B", 9))
    assert b.y[0] == pytest.approx(4.99)
    found.to_html(tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    for part in ("Loss", "Tokens per second", "Memory", "In figures"):
        assert f"<h2>{part}</h2>" in text
    assert "losses: first differ at step 1" in text


def both(a: Path, b: Path) -> RunComparison:
    found = compare(a, b)
    assert isinstance(found, RunComparison)
    return found


def test_the_page_of_a_run_has_its_curves_and_its_prediction(tmp_path: Path) -> None:
    rows = [*steps(20), {"step": 10, "validation_loss": 3.95, "attempt": 2}]
    found = report(write_run(tmp_path / "mine", rows))
    assert len(found.metrics) == 20
    assert found.measured_s == pytest.approx(0.1)
    write_run_html(found, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    for part in ("Loss", "Gradient norm", "Tokens per second", "Step time", "Memory", "Where the step goes", "Starts"):
        assert f"<h2>{part}</h2>" in text
    assert "3.8000" in text
    assert "http://" not in text.partition("<body>")[2]


def test_predicted_and_measured_steps_are_drawn_next_to_each_other(tmp_path: Path) -> None:
    found = report(write_run(tmp_path / "mine", steps(20)))
    parts, totals = measured_waterfall_figure(found.waterfall).data
    scale = totals.x[0] / found.predicted_s
    assert list(totals.y) == ["step, predicted", "step, measured, median"]
    assert totals.x[1] == pytest.approx(found.measured_s * scale)
    assert parts.base[-1] + parts.x[-1] == pytest.approx(totals.x[0], rel=1e-2)
    predicted, measured = found.plot("parts").data
    assert (predicted.name, predicted.x[-1]) == ("predicted", "step")
    assert (measured.name, list(measured.x)) == ("measured, median", ["step"])
    write_run_html(found, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<h2>Step by cause, from the model FLOPs at the peak up</h2>" in text
    assert "model FLOPs at peak" in text
    assert "By component, the mean of the 4 ranks." in text


def test_a_metric_that_data_do_not_have_has_no_curve(tmp_path: Path) -> None:
    rows = [row | {"tokens_per_s": None} for row in steps(20)]
    write_run_html(report(write_run(tmp_path / "mine", rows)), tmp_path / "run.html")
    assert "<h2>Tokens per second</h2>" not in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_runs_are_compared_by_settings_losses_and_speed(tmp_path: Path) -> None:
    faster = [row | {"step_ms": 80.0, "tokens_per_s": 1250.0} for row in steps(30, loss=4.5, attempt=1)]
    job = JOB.replace(train=JOB.train.replace(seed=JOB.train.seed + 1))
    found = both(write_run(tmp_path / "a", steps(20)), write_run(tmp_path / "b", faster, num_attempts=1, job=job))
    assert (found.num_common_steps, found.first_difference) == (20, 1)
    assert {one.key for one in found.changed_settings} >= {"train.seed", "layout.dp_shard", "layout.compile"}
    assert [(one.step, one.b - one.a) for one in found.losses][-1] == (20, pytest.approx(0.5))
    console = Console(file=io.StringIO(), width=80)
    for part in run_comparison_page(found):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    assert "+25.0 %" in console.file.getvalue()
    assert type(found).from_json(found.to_json()) == found


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_a_fact_of_its_run(tmp_path: Path, loss: float) -> None:
    rows = [row | ({"loss": loss} if row["step"] in (3, 12) else {}) for row in steps(12)]
    validation = {"step": 12, "validation_loss": loss, "attempt": 2}
    found = both(write_run(tmp_path / "a", steps(12)), write_run(tmp_path / "b", [*rows, validation]))
    assert found.first_difference == 3
    assert (found.b.first_not_finite, found.b.num_not_finite, found.a.num_not_finite) == (3, 2, 0)
    page = " ".join(str(found).split())
    assert "B: the losses of 2 steps are not finite, the first at step 3" in page
    assert f" {loss:.4f}" in page
    assert f"{loss:+.1f} %" not in page
    assert type(found).from_json(found.to_json()).to_json() == found.to_json()
    assert json.loads(found.to_json())["b"]["last_loss"] == str(loss)
    assert isinstance(found, RunComparisonResult)
    found.to_html(tmp_path / "compare.html")
    same = both(tmp_path / "b", tmp_path / "b")
    assert same.first_difference is None
    assert "the losses of 2 steps are not finite, the first at step 3" in " ".join(str(report(tmp_path / "b")).split())


def test_memory_that_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    rows = [row | {"memory_bytes": None} for row in steps(9)]
    found = both(write_run(tmp_path / "a", steps(9)), write_run(tmp_path / "b", rows))
    assert (found.a.peak_memory_bytes, found.b.peak_memory_bytes) == (2**30, None)


def rows_of(found: RunComparison) -> dict[str, list[str]]:
    """Return the cells of the first table by their label."""
    lines = [line.split("  ") for line in str(found).splitlines()]
    return {cells[0].strip(): [one.strip() for one in cells[1:] if one.strip()] for cells in lines if cells[1:]}


def test_losses_are_compared_at_the_last_step_in_common(tmp_path: Path) -> None:
    validated = [{"step": step, "validation_loss": 3.9 + step / 100, "attempt": 2} for step in (8, 12)]
    a = write_run(tmp_path / "a", [*steps(12), *validated])
    found = both(a, write_run(tmp_path / "b", [*steps(8, loss=4.4), validated[0]]))
    rows = rows_of(found)
    assert rows["loss at step 8"] == ["3.9200", "4.3200", "+10.2 %"]
    assert rows["validation loss at steps 12 and 8"] == ["4.0200", "3.9800"]
    assert rows["steps"] == ["12", "8", "-33.3 %"]
    assert rows["ranks"] == ["4", "4"]


def test_losses_of_runs_without_a_step_in_common_are_shown_alone(tmp_path: Path) -> None:
    later = [row | {"step": row["step"] + 20} for row in steps(8)]
    found = both(write_run(tmp_path / "a", steps(8)), write_run(tmp_path / "b", later))
    assert rows_of(found)["last loss"] == ["3.9200", "3.9200"]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 8, 9, 40])
def test_the_last_step_in_common_is_in_the_table(tmp_path: Path, num_steps: int) -> None:
    found = both(write_run(tmp_path / "a", steps(num_steps)), write_run(tmp_path / "b", steps(num_steps, loss=5.0)))
    shown = [one.step for one in found.losses]
    assert (shown[0], shown[-1], len(shown)) == (1, num_steps, min(num_steps, 8))


def test_equal_losses_are_told_to_the_last_bit(tmp_path: Path) -> None:
    rows = steps(20)
    same = both(write_run(tmp_path / "a", rows), write_run(tmp_path / "b", rows))
    assert same.first_difference is None
    assert not same.changed_settings
    rows[12]["loss"] += 1e-15
    apart = both(tmp_path / "a", write_run(tmp_path / "c", rows))
    assert apart.first_difference == 13


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished step"):
        compare(write_run(tmp_path / "a", []), write_run(tmp_path / "b", steps(3)))


def test_figures_name_the_attempt_that_they_are_of(tmp_path: Path) -> None:
    """A run that was resumed in another layout is not credited with what the first one did."""
    rows = [row | {"attempt": 1, "memory_bytes": 7} for row in steps(12)]
    newest = [row | {"attempt": 2, "memory_bytes": 9} for row in steps(14)[12:]]
    a = write_run(tmp_path / "a", [*rows, *newest])
    found = both(a, write_run(tmp_path / "b", steps(14)))
    assert [(one.attempt, one.first_step, one.last_step, one.num_ranks) for one in found.a.attempts] == [
        (1, 1, 12, 1),
        (2, 13, 14, 4),
    ]
    assert (found.a.num_ranks, found.a.timed_steps, found.a.peak_memory_bytes) == (1, "steps 4 to 12 of attempt 1", 7)
    assert "layout.dp_shard" in {one.key for one in found.changed_settings}
    assert (found.first_difference, found.first_other_layout, found.num_other_layout) == (None, 1, 12)
    assert [(one.a_attempt, one.b_attempt) for one in found.losses][-1] == (2, 2)
    page = " ".join(str(found).split())
    assert "A was resumed: steps 1 to 12 on 1 rank (dp_shard=1); steps 13 to 14 on 4 ranks" in page
    assert "bitwise equal in 14 steps in common, 12 of them, from step 1 on, trained in different layouts" in page


def test_the_first_step_that_differs_is_in_the_table(tmp_path: Path) -> None:
    rows = steps(30)
    b = [row | {"loss": row["loss"] + (row["step"] > 1)} for row in rows]
    found = both(write_run(tmp_path / "a", rows), write_run(tmp_path / "b", b))
    assert found.first_difference == 2
    assert [one.step for one in found.losses][:2] == [1, 2]


def test_a_run_of_few_steps_is_reported_as_such(tmp_path: Path) -> None:
    """A run that is preempted often never has an attempt of enough steps."""
    found = report(write_run(tmp_path / "mine", [row | {"attempt": 1 + (row["step"] > 4)} for row in steps(8)]))
    assert found.waterfall.timed == "steps 5 to 8"
    page = " ".join(str(found).split())
    assert "the median is of few steps, which warm up too: no attempt has 6 steps" in page
    write_run_html(found, tmp_path / "run.html")
    assert "of few steps" in (tmp_path / "run.html").read_text(encoding="utf-8")
    same = both(tmp_path / "mine", tmp_path / "mine")
    assert "A and B with steps that warm up after a start or a resume" in " ".join(str(same).split())
