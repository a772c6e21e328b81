"""The same job on a CUDA device: skipped, with the reason, where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.config.write import to_toml
from meshwright.spec.job.job import Job
from training_runs import FinishedRun, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize(("compute", "mode"), [("float32", "sync"), ("bfloat16", "sync"), ("bfloat16", "async")])
def test_one_cuda_device_trains_and_resumes_to_the_same_bits(tmp_path: Path, compute: str, mode: str) -> None:

    sections = {
        "precision": {"compute": compute},
        "checkpoint": {"mode": mode},
        "run": {"device": "cuda", "deterministic": True, "dir": str(tmp_path / "straight")},
    }
    job_file = tmp_path / "job.toml"
    job_file.write_text(to_toml(Job.from_dict(tiny_job(tmp_path, **sections))))
    train = [sys.executable, "-m", "meshwright", "train", str(job_file), "--ranks", "1"]
    subprocess.run(train, check=True)
    stopped = [*train, f"run.dir={tmp_path / 'stopped'}"]
    assert subprocess.run([*stopped, "train.stop_after=4"], check=False).returncode == 75
    subprocess.run([*stopped, "--resume"], check=True)
    straight, resumed = FinishedRun(tmp_path / "straight", [0]), FinishedRun(tmp_path / "stopped", [0])
    assert resumed.parameter_hash == straight.parameter_hash
    assert straight.losses[6] < straight.losses[1]
