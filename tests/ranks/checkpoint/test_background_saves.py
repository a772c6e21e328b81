"""Saves in the background on real ranks: the staged step is what is committed, and every failure reaches all ranks."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.checkpoint.background.saver import BackgroundSaver, WriterOptions
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.spec.run.run import Run
from run_ranks import run_ranks

SHAPE = (1024, 2500)


def state_of(value: float, num_ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (num_ranks,))
    weight = torch.full(SHAPE, value) + torch.arange(SHAPE[0]).view(-1, 1)
    return {"model": {"w": distribute_tensor(weight, mesh, [Shard(0)]), "buffer.b": torch.full((3,), value)}}


def expected(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value) + torch.arange(SHAPE[0]).view(-1, 1)


def save_and_change(folder: Path, num_ranks: int) -> list[str | None]:
    """Save three times, changing the state as early as it may be; return the errors."""
    run = Run(folder)
    saver = BackgroundSaver("localhost", WriterOptions(niceness=0))
    state = state_of(0.0, num_ranks)
    errors = []
    for step in (1, 2, 3):
        state["model"]["w"].to_local().add_(1)
        state["model"]["buffer.b"].add_(1)
        saver.save(run.checkpoint(step), state, {"step": step}, ["model/buffer.b"])
        state["model"]["buffer.b"].sub_(100)  # a forward
        saver.wait_until_staged()
        state["model"]["w"].to_local().mul_(-1)  # an update
        state["model"]["w"].to_local().mul_(-1)
        state["model"]["buffer.b"].add_(100)
        errors += [finished.error for finished in saver.finished()]
    errors += [finished.error for finished in saver.drain()]
    saver.close()
    return errors


def fail_once(folder: Path, failing_rank: int, how: str) -> list[str | None]:
    """Save, save while the writer process of one rank is killed or may write little, save again; return the errors."""
    run = Run(folder)
    saver = BackgroundSaver("localhost")
    state = state_of(1.0, 2)
    is_failing = int(os.environ["RANK"]) == failing_rank
    errors = []
    for step in (1, 2, 3, 4):
        if step == 2 and is_failing and how == "full":
            resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (1000, 1000))
        if (step, how) in ((2, "killed"), (3, "full")) and is_failing:
            os.kill(saver.writer_pid, signal.SIGKILL)
        saver.save(run.checkpoint(step), state, {})
        saver.wait_until_staged()
        errors += [finished.error for finished in saver.drain()]
    saver.close()
    return errors


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_is_committed_is_the_state_at_the_call(tmp_path: Path, num_ranks: int) -> None:
    errors = run_ranks(save_and_change, num_ranks, tmp_path / "run", num_ranks)
    assert errors == [[None, None, None]] * num_ranks
    run = Run(tmp_path / "run")
    assert run.checkpoint_steps() == [1, 2, 3]
    for step in (1, 2, 3):
        stored = load_parameters(run.checkpoint(step))
        assert torch.equal(stored["w"], expected(float(step)))
        assert torch.equal(stored["buffer.b"], torch.full((3,), float(step)))


@pytest.mark.parametrize(
    ("failing_rank", "how"),
    [
        pytest.param(0, "full", marks=pytest.mark.long),
        pytest.param(1, "killed", marks=pytest.mark.long),
        pytest.param(0, "killed", marks=pytest.mark.long),
        pytest.param(1, "full", marks=pytest.mark.long),
    ],
)
def test_a_failure_on_one_rank_is_known_to_all_and_later_saves_work(
    tmp_path: Path, failing_rank: int, how: str
) -> None:
    reasons = {"killed": ["was killed by signal 9"], "full": ["File too large", "was killed by signal 9"]}[how]
    for errors in run_ranks(fail_once, 2, tmp_path / "run", failing_rank, how):
        failures = [error for error in errors if error is not None]
        assert errors[0] is None
        assert errors[-1] is None
        assert len(failures) == len(reasons)
        for failure, reason in zip(failures, reasons, strict=True):
            assert f"saving failed on rank {failing_rank}: " in failure
            assert reason in failure
    run = Run(tmp_path / "run")
    assert run.checkpoint_steps() == ([1, 3, 4] if how == "killed" else [1, 4])
    assert not [path for path in run.checkpoints.iterdir() if "tmp" in path.name]
