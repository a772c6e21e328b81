"""RunRecorder: the median of a run that was resumed is the one that its report shows."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.app.results.run_result import TrainedRun
from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from meshwright.spec.run.run_report import read_metrics
from meshwright.trainer.run.run_folder import ManifestFile
from meshwright.trainer.run.run_recorder import RunRecorder, StepMetrics
from written_runs import write_run

JOB = Job.from_dict({"train": {"steps": 12}})
STEP = StepMetrics(1, 4.0, 1.0, 1e-3, 8.0, 256.0, 100.0, 0.0, 2**30, None, 1)


def record(folder: Path, attempt: int, last_step: int, step_ms: float) -> Run:
    """Let an attempt train up to `last_step`, as the trainer records it."""
    run = Run(folder if attempt > 1 else write_run(folder, [], num_attempts=1, job=JOB))
    run.logs.mkdir(exist_ok=True)
    manifest = Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    manifest = manifest.replace(job=JOB, attempts=manifest.attempts[:1] * attempt)
    done = len(read_metrics(run))
    with RunRecorder(JOB, run, ManifestFile(run, manifest)) as recorder:
        for step in range(done + 1, last_step + 1):
            recorder.step(replace(STEP, step=step, step_ms=step_ms, attempt=attempt))
        recorder.finish(max(done, last_step), 0)
    return run


def test_an_attempt_of_few_steps_says_its_own_times_and_leaves_the_median_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path / "run", 1, 10, 100.0)
    with caplog.at_level(logging.INFO, "meshwright"):
        run = record(tmp_path / "run", 2, 12, 900.0)
    results = Manifest.from_json(run.manifest.read_text(encoding="utf-8")).results
    assert (results["median_step_ms"], results["p95_step_ms"], results["timed_steps"]) == (
        100.0,
        100.0,
        "steps 4 to 10 of attempt 1",
    )
    assert "steps 11 to 12: median 900 ms, p95 900 ms, warm-up included | 1.8 s in steps" in caplog.text
    assert "100 ms" in TrainedRun(run.folder, ExitCode.DONE).table()


def test_no_step_is_numbered_past_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = record(tmp_path / "run", 1, 12, 100.0)
    with caplog.at_level(logging.INFO, "meshwright"):
        fewer = JOB.replace(train=JOB.train.replace(steps=3))
        manifest = Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
        with RunRecorder(fewer, run, ManifestFile(run, manifest)) as recorder:
            recorder.finish(12, 0)
    assert "12/3" not in caplog.text
    assert "step 12 |" in caplog.text
