"""The steps that a run's step time is taken from, and metrics that a crash cut off."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import ConfigError
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_report import read_metrics, row_line, row_of
from written_runs import write_run


def steps(first: int, last: int, attempt: int, step_ms: float) -> list[dict[str, float]]:
    return [
        {"step": step, "loss": 1.0, "tokens_per_s": 1.0, "memory_bytes": 1, "step_ms": step_ms, "attempt": attempt}
        for step in range(first, last + 1)
    ]


@pytest.mark.parametrize(
    ("resumed", "words", "median_s"),
    [
        (steps(18, 20, 2, 900.0), "steps 4 to 17 of attempt 1", 0.1),  # too few steps to be timed
        (steps(18, 23, 2, 900.0), "steps 21 to 23", 0.9),
        (steps(12, 40, 2, 900.0), "steps 15 to 40", 0.9),
    ],
)
def test_step_times_are_the_newest_attempts_with_enough_steps(
    tmp_path: Path, resumed: list[dict[str, float]], words: str, median_s: float
) -> None:
    metrics = read_metrics(Run(write_run(tmp_path / "run", [*steps(1, 17, 1, 100.0), *resumed])))
    assert (metrics.words_of(metrics.timed), np.median(metrics.step_s[metrics.timed])) == (
        words,
        pytest.approx(median_s),
    )


def test_profiled_steps_are_left_out_where_others_remain(tmp_path: Path) -> None:
    metrics = read_metrics(Run(write_run(tmp_path / "run", steps(1, 9, 1, 100.0))))
    assert metrics.step[metrics.timed_without(range(4, 6))].tolist() == [6, 7, 8, 9]
    assert metrics.step[metrics.timed_without(range(1, 10))].tolist() == [4, 5, 6, 7, 8, 9]


def test_a_run_of_few_steps_is_timed_by_all_of_them(tmp_path: Path) -> None:
    metrics = read_metrics(Run(write_run(tmp_path / "run", steps(1, 4, 1, 100.0))))
    assert metrics.words_of(metrics.timed) == "steps 1 to 4"


def test_a_loss_that_is_no_number_is_valid_json_and_read_again(tmp_path: Path) -> None:
    row = {"step": 1, "loss": float("nan"), "grad_norm": float("-inf"), "step_ms": 1.0, "decision": "skip"}
    line = row_line(row)
    raw = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (raw["loss"], raw["not_finite"]) == (None, {"loss": "nan", "grad_norm": "-inf"})
    assert repr(row_of(line)) == repr(row)
    run = Run(write_run(tmp_path / "run", steps(2, 9, 1, 100.0)))
    # An older run's line, and one of a validation.
    older, validation = '{"step": 10, "loss": NaN, "step_ms": 1.0}\n', {"step": 10, "validation_loss": float("inf")}
    run.metrics.write_text(line + run.metrics.read_text() + older + row_line(validation))
    metrics = read_metrics(run)
    assert metrics.steps_not_finite.tolist() == [1, 10]
    assert metrics.grad_norm[0] == -np.inf
    assert metrics.validation_loss.tolist() == [np.inf]
    assert metrics.steps_skipped.tolist() == [1]


def test_a_return_to_an_earlier_step_cuts_off_the_later_ones(tmp_path: Path) -> None:
    rows = [
        *({"step": step, "step_ms": 1.0} for step in range(1, 8)),
        {"step": 7, "validation_loss": 1.0},
        {"step": 8, "step_ms": 1.0, "decision": "skip"},
        {"step": 9, "step_ms": 1.0, "decision": "roll back"},
        # From step 5 on, and back to it at the end.
        {"step": 6, "step_ms": 2.0, "decision": "skip"},
        {"step": 7, "step_ms": 2.0, "decision": "roll back"},
    ]
    run = Run(write_run(tmp_path / "run", []))
    run.metrics.write_text("".join(map(row_line, rows)), encoding="utf-8")
    metrics = read_metrics(run)
    assert metrics.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert metrics.steps_skipped.tolist() == [6]
    assert metrics.num_skips_cut_off == 3
    assert not len(metrics.validation_step)


def test_an_incomplete_last_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(write_run(tmp_path / "run", steps(1, 9, 1, 100.0)))
    with run.metrics.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 10, "st')
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert len(read_metrics(run)) == 9
    assert "its last line is incomplete and left out" in caplog.text


def test_an_incomplete_line_before_the_last_is_refused(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", steps(1, 9, 1, 100.0)))
    run.metrics.write_text('{"step": 10, "st\n' + run.metrics.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as metrics"):
        read_metrics(run)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("no json", "Expecting value at column 1"),
        ("[1]", "it is no object"),
        ('{"step_ms": 1.0}', '"step" is missing'),
        ('{"step": 2, "step_ms": null}', '"step_ms" is missing'),
        ('{"step": 2, "step_ms": NaN}', '"step_ms" is nan'),
        ('{"step": 2, "step_ms": 1.0, "loss": "high"}', '"loss" is "high", no number'),
        ('{"step": Infinity, "step_ms": 1.0}', '"step" is Infinity, no number'),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, fault: str) -> None:
    run = Run(write_run(tmp_path / "run", steps(1, 2, 1, 100.0)))
    with run.metrics.open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_metrics(run)
    assert str(raised.value).startswith(f"{run.metrics}, line 3, cannot be read as metrics: {fault}")
    assert str(raised.value).endswith("delete that line, or restore the file from a copy")


def test_missing_metrics_are_named_once(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", []))
    run.metrics.unlink()
    with pytest.raises(ConfigError) as raised:
        read_metrics(run)
    assert str(raised.value).count(str(run.metrics)) == 1
    assert "Errno" not in str(raised.value)


def test_metrics_that_are_no_text_are_told(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", []))
    run.metrics.write_bytes(b"ab\xff\n")
    with pytest.raises(ConfigError, match="cannot be read as metrics: invalid start byte at byte 2"):
        read_metrics(run)
