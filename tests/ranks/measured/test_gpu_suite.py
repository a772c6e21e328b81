"""The suite for one GPU at its toy size, and its bars."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu_suite import predicted
from benchmarks.gpu_suite.__main__ import main
from benchmarks.gpu_suite.cases import (
    CASES,
    EIGHT_B,
    HALF_EIGHT_B,
    HF,
    LONG,
    MIXTURE,
    ONE_B,
    OURS,
    SHORT,
    Case,
    Shape,
    suite_job,
)
from benchmarks.gpu_suite.suite_run import NUM_STEPS, NUM_WARM_UP, Measured
from benchmarks.gpu_suite.suite_table import bars, loss_difference
from meshwright.config.write import to_toml


def _rows(**losses: tuple[float, ...]) -> dict[str, Measured]:
    """Return rows in which ours takes 1 s, float8 0.75 s, and HF Trainer 1.15 s."""
    rows = {}
    for case in CASES:
        step_s = (0.75 if case.precision == "float8" else 1.0) * (1.0 if case.who == OURS else 1.15)
        rows[case.name] = Measured(
            case.name, step_s, peak_step_s=0.45, predicted_s=1.04, losses=losses.get(case.who, (5.0, 4.0))
        )
    return rows


def test_bars_are_met_missed_or_not_measured() -> None:
    lines = dict(line.split(": ", 1) for line in bars(CASES, _rows()) if "MFU" in line or "off" in line)
    assert lines == {ONE_B.name: "MFU: 0.450, bar at least 0.5: missed", EIGHT_B.name: lines[EIGHT_B.name]}
    assert lines[EIGHT_B.name] == "step off the plan's by: 0.040, bar at most 0.05: met"
    words = [line.rpartition(": ")[2] for line in bars(CASES, _rows())]
    assert words.count("met") == 8
    assert all("not measured" in line for line in bars(CASES, {}))


def test_a_peer_that_does_other_work_is_no_peer() -> None:
    rows = {name: row for name, row in _rows(**{HF: (5.0, 4.5)}).items() if "compiled" not in name}
    ours = f"{ONE_B.name}, bfloat16: tokens/s of the best peer's"
    assert f"{ours}: not measured (bar: at least 1.1)" in list(bars(CASES, rows))
    assert loss_difference(Case(ONE_B, "bfloat16", HF), CASES, rows) == 0.125


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [EIGHT_B, *(pytest.param(one, marks=pytest.mark.long) for one in (ONE_B, HALF_EIGHT_B, SHORT, LONG, MIXTURE))],
)
def test_shapes_fit_by_the_plan(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = "NVIDIA H200" if shape.needed_bytes else "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(predicted, "device_name", lambda device: gpu)
    job, file = suite_job(shape, tmp_path, "cuda"), tmp_path / "job.toml"
    file.write_text(to_toml(job))
    found = predicted.predict(file, Case(shape, "float8", OURS).arguments, "cuda")
    assert found is not None
    floor_s = predicted.peak_s(job, "cuda")
    assert floor_s is not None
    # float8 can be above the peak of bfloat16, by which MFU is measured.
    assert floor_s / 2 < found.step_s < 5 * floor_s
    assert found.peak_bytes < (shape.needed_bytes or 76e9)


@pytest.mark.long
@pytest.mark.slow
def test_toy_row_of_ours_runs_once_and_is_kept(tmp_path: Path) -> None:
    out, folder = tmp_path / "suite.json", tmp_path / "work"
    arguments = ["--toy", "--only", "bfloat16, ours", "--out", str(out), "--folder", str(folder)]
    first = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    (row,) = json.loads(out.read_text())["rows"]
    assert not row["failure"]
    assert len(row["losses"]) == NUM_WARM_UP + NUM_STEPS
    assert row["losses"][-1] < row["losses"][0]
    written = out.stat().st_mtime_ns
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert out.stat().st_mtime_ns == written, "a finished row was run again"


@pytest.mark.long
def test_toy_suite_compares_ours_with_hf_trainer(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    ended = CliRunner().invoke(
        main, ["--toy", "--out", str(out), "--folder", str(tmp_path / "work")], catch_exceptions=False
    )
    assert ended.exit_code == 0, ended.output
    assert "not comparable" not in ended.output
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert not any(row["failure"] for row in rows.values())
    assert rows["llama-1m, bfloat16, HF Trainer"]["losses"]
