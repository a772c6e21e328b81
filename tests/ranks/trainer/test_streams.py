"""Users' iterables: what one rank reads for all trains the same model on any ranks, through kills and resumes."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
import sample_sources
from meshwright.errors import ExitCode
from meshwright.spec.fault import Fault
from repository import ROOT
from training_runs import SMALL, FinishedRun, tiny_job, train_all_on_ranks, train_on_ranks

JOB = ROOT / "examples" / "tiny.toml"
# Epochs end within batches.
KEYS = (*SMALL, "train.steps=8", "train.global_batch_size=8", "checkpoint.interval=3", "run.timeout_s=60")


def stream_job(folder: Path, source: str, **train: Any) -> dict[str, Any]:
    data = {"source": f"sample_sources:{source}", "options": {"length": 30}}
    return tiny_job(folder, data=data, train={"exact_elastic": True, **train}, checkpoint={"interval": 4})


@pytest.mark.parametrize("source", [pytest.param("Counting", marks=pytest.mark.long), "generated"])
def test_a_resume_on_other_ranks_has_the_bits_of_a_run_on_one(tmp_path: Path, source: str) -> None:
    whole = train_on_ranks(stream_job(tmp_path, source), tmp_path / "whole", 1)
    train_on_ranks(stream_job(tmp_path, source, stop_after=3), tmp_path / "parts", 2)
    resumed = train_on_ranks(stream_job(tmp_path, source), tmp_path / "parts", 1, resume=True)
    assert resumed.parameter_hash == whole.parameter_hash
    assert resumed.losses == whole.losses
    log = (tmp_path / "parts" / "logs" / "rank-0.log").read_text()
    said = log.count("the first 24 samples of data.source were read again: it has no state_dict()")
    assert said == (source == "generated")


def test_every_axis_gets_the_samples_of_one_process(tmp_path: Path) -> None:
    data = {"source": "sample_sources:Counting", "options": {"length": 30}}
    layouts = [{"tp": 2}, {"cp": 2}, {"pp": 2, "microbatch_size": 1}, {"dp_shard": 2}]
    one, *others = (
        train_all_on_ranks(tmp_path, num_ranks, [{"data": data, "layout": layout} for layout in group])
        for num_ranks, group in ((1, [{"dp_shard": 1}]), (2, [{"dp_shard": 1, **layout} for layout in layouts]))
    )
    for found in others[0]:
        found.require_close(one[0])


def test_a_stream_validates_on_the_samples_that_it_names(tmp_path: Path) -> None:
    job = stream_job(tmp_path, "Validated", validation_interval=3)
    job["data"]["options"] = {}
    found: FinishedRun = train_on_ranks(job, tmp_path / "run", 2)
    assert [row["step"] for row in found.validation] == [3, 6]


@pytest.mark.long
@pytest.mark.parametrize("source", ["Counting", "Iterable"])
def test_a_kill_loses_and_repeats_no_sample_of_a_stream(tmp_path: Path, source: str) -> None:
    shutil.copy(sample_sources.__file__, tmp_path / "streams_of_chaos.py")
    shutil.copy(JOB, tmp_path / "job.toml")
    faults = [Fault(kind="crash", rank=0, step=6, phase="backward")]
    words = (*KEYS, f"data.source=streams_of_chaos:{source}", "data.options.length=30")
    found = mw.chaos(tmp_path / "job.toml", *words, faults=faults, ranks=2)
    assert found.holds, found.problems
    assert found.outcomes[0].lost_steps == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_of_any_rank_in_any_phase_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    shutil.copy(sample_sources.__file__, tmp_path / "streams_of_chaos.py")
    shutil.copy(JOB, tmp_path / "job.toml")
    phases = ("data", "forward", "agree", "checkpoint", "optimizer")
    faults = [
        Fault(kind="terminate" if place == 2 else "crash", rank=place % 2, step=3 + 3 * place, phase=phase)
        for place, phase in enumerate(phases)
    ]
    words = (*KEYS, "train.steps=18", "data.source=streams_of_chaos:Counting", "data.options.length=30")
    found = mw.chaos(tmp_path / "job.toml", *words, faults=faults, ranks=2)
    assert found.holds, found.problems


@pytest.mark.long
def test_replicas_by_themselves_read_no_stream(tmp_path: Path) -> None:
    shutil.copy(sample_sources.__file__, tmp_path / "streams_of_chaos.py")
    job = tmp_path / "job.toml"
    shutil.copy(JOB, job)
    words = (*KEYS, "layout.dp_replicate=2", "layout.dp_shard=1", "replicas.independent=true")
    words += ("data.source=streams_of_chaos:Counting", f"run.dir={tmp_path / 'run'}")
    command = [sys.executable, "-m", "meshwright", "train", str(job), "--ranks", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    assert "set replicas.independent to false" in " ".join(done.stderr.split())
