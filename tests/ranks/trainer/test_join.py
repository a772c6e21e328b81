"""A replica joins a run that trains, from a launcher of its own, and leaves it, without a trace in the result."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError, ExitCode, Retryable
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.replicas.joining import Invitation, invite
from meshwright.trainer.run.run_folder import read_manifest
from training_runs import tiny_job

STEPS = 400


def job_file(folder: Path, name: str, *, is_independent: bool = True) -> Path:
    job = tiny_job(
        folder,
        train={"steps": STEPS, "exact_elastic": True},
        layout={"dp_shard": 1, "dp_replicate": 2 if is_independent else 1, "microbatch_size": 2},
        replicas={"independent": is_independent},
        checkpoint={"interval": 0},
        run={"dir": str(folder / name), "log_interval": 100},
    )
    path = folder / f"{name}.toml"
    path.write_text(to_toml(Job.from_dict(job)))
    return path


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen((sys.executable, "-m", "meshwright", *words), env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_step(run: Run, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if run.metrics.exists() and run.metrics.read_text().count('"loss"') >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within 200 s")


def hash_of(run: Run) -> object:
    manifest = read_manifest(run)
    assert manifest is not None
    return manifest.results["parameter_hash"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_replicas_join_a_run_and_leave_it(tmp_path: Path) -> None:
    alone = start("train", str(job_file(tmp_path, "alone", is_independent=False)), "--ranks", "1")
    assert alone.wait(300) == 0
    run = Run(tmp_path / "run")
    launcher = start("train", str(job_file(tmp_path, "run")), "--ranks", "2")
    wait_for_step(run, 3)
    assert stat.S_IMODE(run.invitation.stat().st_mode) == 0o600
    manifest = read_manifest(run)
    assert manifest is not None
    # Stopped, so that it cannot end before the others have come.
    writer = manifest.attempts[-1].pids[0]
    os.kill(writer, signal.SIGSTOP)
    stays, killed, leaves = (start("join", str(run.folder)) for _ in range(3))
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not all(run.of_replica(one).heartbeat(0).exists() for one in (2, 3, 4)):
        time.sleep(0.05)
    os.kill(writer, signal.SIGCONT)
    killed.kill()
    leaves.send_signal(signal.SIGTERM)
    assert launcher.wait(300) == 0
    assert stays.wait(60) == 0
    assert leaves.wait(60) == ExitCode.RETRY
    killed.wait(60)
    assert not run.invitation.exists()
    assert hash_of(run) == hash_of(Run(tmp_path / "alone"))


def test_there_must_be_a_run_to_join(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        mw.join(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"replicas\.independent = true"):
        mw.join(tmp_path)


@pytest.mark.parametrize(
    ("exit_code", "what"),
    [
        (0, "has ended, with all its steps done"),
        (75, r"it ended with exit code 75: start it again \(`meshwright train .* --resume`\), and join"),
        (None, "nothing trains in .*, no launcher trains it: start it again"),
    ],
)
def test_a_run_that_has_ended_is_joined_by_none(tmp_path: Path, exit_code: int | None, what: str) -> None:
    job = Job.from_dict(tiny_job(tmp_path, replicas={"independent": True}))
    manifest = Manifest(job=job, seed=0, num_parameters=1, exit=exit_code)
    Run(tmp_path).manifest.write_text(manifest.to_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match=what):
        mw.join(tmp_path)


def test_a_launcher_that_is_gone_does_not_answer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    job = Job.from_dict(tiny_job(tmp_path, replicas={"independent": True}))
    config = RankConfig(job=job, run_dir=str(tmp_path), module_dir=str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    run.invitation.parent.mkdir()
    invite(run, Invitation(config=config, host="127.0.0.1", port=port, token="x", num_ranks=1, num_threads=1))
    with pytest.raises(Retryable, match=rf"does not answer at 127\.0\.0\.1:{port} .*start the run again"):
        mw.join(tmp_path)
    assert not run.replicas()
