"""Independent replicas whose processes are all frozen: the run continues from its checkpoint, or ends and says why."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.evidence import process_state, read_heartbeats
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import read_manifest
from training_runs import tiny_job

Start = Callable[..., "subprocess.Popen[str]"]
LIMIT_S = 120.0
"""In which anything that is waited for has happened, on a machine with much else to do."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def start(tmp_path: Path, run: Run) -> Iterator[Start]:
    """Return a function that starts a run of two replicas in the background."""
    job = tiny_job(
        tmp_path,
        train={"steps": 400, "exact_elastic": True},
        layout={"dp_shard": 1, "dp_replicate": 2, "microbatch_size": 2},
        replicas={"independent": True},
        checkpoint={"interval": 10},
        run={"dir": str(run.folder), "hang_limit_s": 5, "hang_after_s": 2, "timeout_s": 60, "grace_s": 60},
    )
    path = tmp_path / "job.toml"
    path.write_text(to_toml(Job.from_dict(job)))
    with ExitStack() as stack:

        def begin(*words: str) -> subprocess.Popen[str]:
            command = (sys.executable, "-m", "meshwright", "train", str(path), "--ranks", "2", *words)
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            stack.callback(process.stderr.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin
        kill(pids_of(run))


def pids_of(run: Run) -> dict[int, int]:
    """Return the process ids of the ranks that live, by replica."""
    beats = {int(own.folder.name): read_heartbeats(own).get(0) for own in run.replicas()}
    return {one: beat.pid for one, beat in beats.items() if beat is not None and process_state(beat) != "gone"}


def kill(pids: dict[int, int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def frozen(run: Run, after_step: int) -> dict[int, int]:
    """Stop all ranks once there is a checkpoint from `after_step` on, and return their process ids."""
    wait_until(lambda: max(run.checkpoint_steps(), default=0) >= after_step, "no checkpoint")
    pids = pids_of(run)
    assert len(pids) == 2
    kill(pids, signal.SIGSTOP)
    return pids


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.long
def test_a_run_that_is_frozen_as_a_whole_ends_and_says_why(run: Run, start: Start) -> None:
    launcher = start("run.max_restarts=0")
    pids = frozen(run, 10)
    _, said = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == ExitCode.RETRY
    assert all(map(is_gone, pids.values()))
    for replica in pids:
        assert f"replica {replica} is killed: its process has not answered for" in said
    manifest = read_manifest(run)
    assert manifest is not None
    assert manifest.exit == ExitCode.RETRY


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_is_frozen_as_a_whole_goes_on_from_its_checkpoint(run: Run, start: Start) -> None:
    launcher = start("run.max_restarts=2")
    pids = frozen(run, 10)
    wait_until(lambda: all(map(is_gone, pids.values())), "frozen ranks were not killed")
    _, said = launcher.communicate(timeout=2 * LIMIT_S)
    assert launcher.returncode == ExitCode.DONE, said
    assert run.checkpoint_steps()[-1] == 400


@pytest.mark.long
@pytest.mark.timeout(600)
def test_frozen_ranks_of_a_killed_launcher_do_not_end_the_run_that_resumes(run: Run, start: Start) -> None:
    launcher = start()
    pids = frozen(run, 10)
    launcher.kill()
    # Not until the end of its output, which the frozen ranks hold open.
    launcher.wait()
    resumed = start("--resume", "run.max_restarts=0")
    wait_until(lambda: all(map(is_gone, pids.values())), "frozen ranks of another launcher were left")
    _, said = resumed.communicate(timeout=2 * LIMIT_S)
    assert resumed.returncode == ExitCode.DONE, said
    manifest = read_manifest(run)
    assert manifest is not None
    assert [one.exit for one in manifest.attempts] == [None, ExitCode.DONE]
