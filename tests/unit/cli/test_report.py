"""`meshwright report`: a run's steps beside what was expected of its layout."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.run import Attempt, Manifest

JOB = Job.from_dict(
    {
        "model": {"source": "llama3-8b"},
        "cluster": {"name": "dgx-h100"},
        "precision": {"compute": "bfloat16"},
        "train": {"seq_len": 8192},
    }
)


def write_run(folder: Path, step_ms: float) -> Path:
    folder.mkdir()
    start = Attempt(
        started_at="2026-01-01T00:00:00+00:00",
        start_step=0,
        pids=[1],
        hosts=["h"],
        layout=Layout(dp_shard=8, compile=True),
        versions={},
    )
    manifest = Manifest(job=JOB, seed=0, num_parameters=1, attempts=[start])
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    rows = [{"step": step, "step_ms": step_ms, "attempt": 1} for step in range(1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_the_waterfall_ends_at_the_expected_step_beside_the_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    expected_s = sum(record["expected"]["estimate"]["step"].values())
    assert record["measured_step_s"] == pytest.approx(1.0)
    assert 0.2 < expected_s < 2
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = capsys.readouterr().out
    assert "dp_shard=8" in page
    assert "measured, the median" in page
    assert f"{100 * (expected_s - 1):.1f} % of the measured step" in page
    assert "MFU" in page


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "none")]) == ExitCode.BAD_INPUT
    assert "is no run folder" in capsys.readouterr().err
