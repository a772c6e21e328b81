"""Run folders written by hand: a manifest and metrics, without training."""

import json
from pathlib import Path
from typing import Any

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.run import Attempt, Manifest

JOB = Job.from_dict({"cluster": {"name": "dgx-h100"}, "precision": {"compute": "bfloat16"}})
STEPS = [{"step": step, "step_ms": 900.0 if step == 1 else 100.0 + step % 3, "attempt": 2} for step in range(1, 12)]


def attempt(layout: Layout) -> Attempt:
    return Attempt(
        started_at="2026-01-01T00:00:00+00:00", start_step=0, pids=[1], hosts=["h"], layout=layout, versions={}
    )


def write_run(folder: Path, metrics: list[dict[str, Any]], num_attempts: int = 2, job: Job = JOB) -> Path:
    folder.mkdir()
    layouts = [Layout(), Layout(dp_shard=4, microbatch_size=2, compile=True)][:num_attempts]
    attempts = [attempt(layout) for layout in layouts]
    manifest = Manifest(job=job, seed=0, num_parameters=1, attempts=attempts)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
    return folder
