"""`meshwright train` as a user starts it: real processes, real signals, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.app.train import resume
from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import look
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from training_runs import tiny_job, train_on_ranks

MESHWRIGHT = (sys.executable, "-m", "meshwright")


class Command:
    """A job file in a folder of its own and the ways to run it."""

    def __init__(self, folder: Path, **sections: dict[str, object]) -> None:
        self.folder = folder
        self.run = Run(folder / "run")
        own = {"run": {"device": "cpu", "dir": str(self.run.folder), "timeout_s": 300.0}}
        changes = {name: {**own.get(name, {}), **keys} for name, keys in sections.items()}
        self.job = tiny_job(folder, **{**own, **changes})
        self.job_file = folder / "job.toml"
        self.job_file.write_text(to_toml(Job.from_dict(self.job)))

    def start(self, *arguments: str, prefix: tuple[str, ...] = MESHWRIGHT, **variables: str) -> subprocess.Popen[str]:
        """Start training, with these environment variables, without waiting for it."""
        command = [*prefix, "train", str(self.job_file), *arguments]
        out: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **out, text=True, start_new_session=True, env=os.environ | variables)

    def train_as_rank(self, rank: int, num_ranks: int, *arguments: str, **variables: str) -> tuple[int, str]:
        """Return the exit code and output of one rank, as torchrun starts it."""
        with socket.create_server(("localhost", 0)) as unused:
            port = unused.getsockname()[1]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        process = self.start(*arguments, **place, MASTER_ADDR="localhost", MASTER_PORT=str(port), **variables)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def train(self, *arguments: str, prefix: tuple[str, ...] = MESHWRIGHT) -> tuple[int, str]:
        """Return the exit code and everything printed."""
        process = self.start(*arguments, prefix=prefix)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_json(self.run.manifest.read_text())

    def wait_for_step(self, step: int) -> None:
        """Return once metrics.jsonl holds `step`."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            rows = self.run.metrics.read_text().splitlines() if self.run.metrics.exists() else []
            if any(json.loads(row)["step"] >= step for row in rows if row.endswith("}")):
                return
            time.sleep(0.02)
        raise AssertionError(f"no step {step} within 600 s")


def is_alive(pid: int) -> bool:
    """Return whether a process that is no zombie has this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


ENDLESS = {"train": {"steps": 1_000_000}, "checkpoint": {"interval": 20}}
"""A run that only a signal ends, however slow the test is to send it."""


def test_a_killed_rank_ends_the_run_with_retry_and_a_resume_is_bit_equal(tmp_path: Path) -> None:
    """The job's file names no degree: then dp_shard takes the ranks that are asked for."""
    (tmp_path / "killed").mkdir()
    (tmp_path / "straight").mkdir()
    killed = Command(tmp_path / "killed", train={"steps": 24}, checkpoint={"interval": 4})
    straight = Command(tmp_path / "straight", train={"steps": 24}, checkpoint={"interval": 4})

    killed.job_file.write_text(to_toml(Job.from_dict({**killed.job, "layout": {"microbatch_size": 2}})))
    process = killed.start("--ranks", "2")
    killed.wait_for_step(5)
    [attempt] = killed.manifest.attempts
    assert attempt.layout.dp_shard == 2
    pids = attempt.pids
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.RETRY, output
    assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in output
    assert "rank 1 was killed by SIGKILL" in diagnose(look(killed.run)).headline
    assert_all_gone(pids)

    # Without a command: ranks that are forked start in a fraction of the time.
    assert train_on_ranks(killed.job, killed.run.folder, 2, resume=True).codes == [ExitCode.DONE] * 2
    uninterrupted = train_on_ranks(straight.job, straight.run.folder, 2)
    assert uninterrupted.codes == [ExitCode.DONE] * 2
    assert killed.manifest.results["parameter_hash"] == uninterrupted.parameter_hash
    assert killed.manifest.attempts[1].start_step >= 4


@pytest.mark.long
def test_max_restarts_goes_on_by_itself(tmp_path: Path) -> None:
    command = Command(tmp_path, train={"steps": 60}, checkpoint={"interval": 10}, run={"max_restarts": 1})
    process = command.start("--ranks", "2")
    command.wait_for_step(15)
    os.kill(command.manifest.attempts[-1].pids[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.DONE, output
    assert "restart 1 of 1" in output
    assert command.manifest.exit == ExitCode.DONE
    assert [attempt.exit for attempt in command.manifest.attempts] == [ExitCode.RETRY, ExitCode.DONE]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "mode", "code"),
    [
        (signal.SIGTERM, "sync", ExitCode.RETRY),
        (signal.SIGTERM, "async", ExitCode.RETRY),
        (signal.SIGHUP, "async", ExitCode.RETRY),
        (signal.SIGINT, "async", ExitCode.INTERRUPTED),
    ],
    ids=str,
)
def test_a_signal_saves_and_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, mode: str, code: ExitCode
) -> None:
    """Also where checkpoints are written in the background: the last one is awaited."""
    command = Command(tmp_path, **{**ENDLESS, "checkpoint": {"interval": 20, "mode": mode}})
    process = command.start("--ranks", "2")
    command.wait_for_step(5)
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    assert command.manifest.exit == code
    assert_all_gone(command.manifest.attempts[-1].pids)
    assert command.run.checkpoint_steps() == [command.manifest.results["last_step"]]


@pytest.mark.long
def test_a_run_that_is_still_written_is_left_alone(tmp_path: Path) -> None:
    command = Command(tmp_path, **ENDLESS)
    process = command.start()
    command.wait_for_step(1)
    for option in ("--resume", "--overwrite"):
        code, output = command.train(option)
        assert code == ExitCode.RETRY, output
        assert f"another process is training into {command.run.folder}" in output
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert command.manifest.exit == ExitCode.RETRY
    assert len(command.manifest.attempts) == 1


@pytest.mark.long
def test_nohup_protects_from_a_closed_terminal(tmp_path: Path) -> None:
    command = Command(tmp_path, train={"steps": 60})
    process = command.start("--ranks", "2", prefix=("nohup", *MESHWRIGHT))
    command.wait_for_step(5)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.DONE, output


@pytest.mark.long
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    command = Command(tmp_path, **ENDLESS)
    process = command.start("--ranks", "2")
    command.wait_for_step(5)
    process.kill()
    process.communicate(timeout=600)
    assert_all_gone(command.manifest.attempts[-1].pids)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_of_a_killed_launcher_does_not_keep_the_run_from_its_resume(tmp_path: Path, rank: int) -> None:
    """Rank 0 holds the lock of the run folder."""
    command = Command(tmp_path, train={"steps": 200}, checkpoint={"interval": 4})
    process = command.start("--ranks", "2")
    command.wait_for_step(5)
    pid = command.manifest.attempts[-1].pids[rank]
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    # Not until the end of its output, which the frozen rank holds open.
    process.wait()
    code, output = command.train("--resume", "--ranks", "2")
    process.communicate(timeout=600)
    assert code == ExitCode.DONE, output
    assert f"(pid {pid}) is frozen: it is killed" in output
    assert not is_alive(pid)


EXITS = """
import os
import torch
class Data:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if os.path.exists(os.environ["EXITS"]):
            os._exit(0)
        return torch.arange(32) % 16, torch.arange(1, 33) % 16
"""


@pytest.mark.long
@pytest.mark.parametrize("independent", [False, True])
def test_a_rank_that_something_in_it_ends_well_has_not_trained_all_its_steps(tmp_path: Path, independent: bool) -> None:
    """Such as native code of a library that calls exit(0)."""
    (tmp_path / "exiting.py").write_text(EXITS)
    command = Command(
        tmp_path,
        data={"source": "exiting:Data", "validation_fraction": 0.0},
        layout={"dp_replicate": 2, "dp_shard": 1, "microbatch_size": 1},
        replicas={"independent": independent},
        **ENDLESS,
    )
    path = os.pathsep.join([str(tmp_path), *sys.path, os.environ.get("PYTHONPATH", "")])
    process = command.start("--ranks", "2", PYTHONPATH=path, EXITS=str(tmp_path / "exit"))
    command.wait_for_step(3)
    (tmp_path / "exit").touch()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.RETRY, output
    assert "ended with exit code 0 in step" in output
    assert command.manifest.exit == ExitCode.RETRY


@pytest.mark.long
@pytest.mark.parametrize("hangs_at", [-1, 100])
def test_what_ranks_have_started_does_not_outlive_a_killed_launcher(tmp_path: Path, hangs_at: int) -> None:
    """Whether the ranks then save and stop or, waiting for a worker that hangs, are ended."""
    pids_file = tmp_path / "pids"
    data = {"source": "helped_stream:Helped", "options": {"pids_file": str(pids_file), "hangs_at": hangs_at}}
    command = Command(tmp_path, data=data, **ENDLESS)
    process = command.start("--ranks", "2", PYTHONPATH=os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]))
    command.wait_for_step(12)
    process.kill()
    process.communicate(timeout=600)
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert_all_gone([*command.manifest.attempts[-1].pids, *pids])
    assert bool(command.run.checkpoint_steps()) == (hangs_at < 0)


@pytest.mark.long
def test_torchrun_does_the_same(tmp_path: Path) -> None:
    (tmp_path / "torchrun").mkdir()
    (tmp_path / "own").mkdir()
    torchrun, own = Command(tmp_path / "torchrun"), Command(tmp_path / "own")
    prefix = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "meshwright",
    )
    code, output = torchrun.train(prefix=prefix)
    assert code == 0, output
    assert own.train("--ranks", "2")[0] == 0
    assert torchrun.manifest.results["parameter_hash"] == own.manifest.results["parameter_hash"]


@pytest.mark.long
def test_a_run_folder_is_resumed_by_its_name(tmp_path: Path) -> None:
    command = Command(tmp_path, train={"steps": 4, "stop_after": 2})
    assert train_on_ranks(command.job, command.run.folder, 1).codes == [ExitCode.RETRY]
    moved = command.run.folder.rename(tmp_path / "moved")
    done = resume(moved, "train.stop_after=none")
    assert (done.exit_code, done.folder) == (ExitCode.DONE, moved)
    assert Run(moved).checkpoint_steps()[-1] == 4
    assert not command.run.folder.exists()


@pytest.mark.long
def test_an_existing_run_is_kept_unless_asked(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.train()[0] == 0
    before = command.run.manifest.read_text()
    code, output = command.train()
    assert code == ExitCode.BAD_INPUT
    assert "--resume" in output
    assert "--overwrite" in output
    assert command.run.manifest.read_text() == before
    assert command.train("--overwrite")[0] == 0
    [aside] = tmp_path.glob("run.replaced-*")
    assert (aside / "manifest.json").read_text() == before


@pytest.mark.long
def test_a_restart_by_torchrun_goes_on_even_if_its_first_start_was_to_overwrite(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.train("train.stop_after=3")[0] == ExitCode.RETRY
    code, output = command.train_as_rank(0, 1, "--overwrite", TORCHELASTIC_RESTART_COUNT="1")
    assert code == ExitCode.DONE, output
    assert command.manifest.attempts[-1].start_step == 3


@pytest.mark.long
def test_a_rank_that_cannot_reach_the_others_may_be_tried_again(tmp_path: Path) -> None:
    code, output = Command(tmp_path, run={"timeout_s": 1.0}).train_as_rank(1, 2)
    assert code == ExitCode.RETRY, output
    assert "rank 1 of 2 could not reach the others" in output


@pytest.mark.long
def test_a_run_that_is_past_the_step_to_stop_after_stays_stopped(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.train("train.stop_after=3")[0] == ExitCode.RETRY
    code, output = command.train("--resume", "train.stop_after=2")
    # Not 75: the same command would do no step each time.
    assert code == ExitCode.BAD_INPUT, output
    assert "set train.stop_after=none, or to a step after 3" in output
    assert command.run.checkpoint_steps() == [3]


@pytest.mark.long
def test_another_job_cannot_be_resumed_into_a_run(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.train()[0] == 0
    code, output = command.train("--resume", "train.seed=1")
    assert code == ExitCode.BAD_INPUT
    assert "train.seed was 0, is 1" in output


def test_a_layout_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    command = Command(tmp_path, layout={"dp_shard": 1, "tp": 3})
    code, output = command.train()
    assert code == ExitCode.BAD_INPUT
    assert "layout.tp = 3" in output
    assert not command.run.manifest.exists()
