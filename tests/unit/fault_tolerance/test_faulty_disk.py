"""Calls on the files of checkpoints fail where a fault says, in the real saving and loading; no older one is lost."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.checkpoint import load_newest, save
from meshwright.checkpoint.prune import prune
from meshwright.errors import CheckpointError, problems_raised_by
from meshwright.fault_tolerance.storage.faulty_disk import FaultyDisk
from meshwright.spec.fault import Fault
from meshwright.spec.run.chaos_report import Injection
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((3000,), float(step)), "b": torch.full((5,), float(step))}}


def save_step(run: Run, step: int) -> None:
    save(run.checkpoint(step), state_of(step), {"step": step})
    prune(run, RetentionRule(keep=2))


def assert_newest(run: Run, step: int) -> None:
    found = state_of(0)
    loaded = load_newest(run, found)
    assert loaded is not None
    assert loaded[0] == step
    assert torch.equal(found["model"]["w"], state_of(step)["model"]["w"])


def injection(run: Run) -> Injection:
    return Injection.from_json(run.injected_fault(0).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["no-space", "io-error"])
@pytest.mark.parametrize("call", range(1, 16))
def test_a_save_that_fails_anywhere_leaves_the_older_ones(tmp_path: Path, kind: str, call: int) -> None:
    run = Run(tmp_path)
    save_step(run, 1)
    save_step(run, 2)
    fault = Fault.from_dict({"kind": kind, "rank": 0, "step": 3, "argument": call})
    with FaultyDisk(run, {0: fault}, last_step=2):
        problems = problems_raised_by(lambda: save_step(run, 3))
        reason = os.strerror(errno.ENOSPC if kind == "no-space" else errno.EIO)
        assert all(reason in problem for problem in problems)
        # The last call that can fail makes the rename durable, after it.
        newest = max(run.checkpoint_steps())
        assert newest == 3 or problems
        assert_newest(run, newest)
    save_step(run, 4)
    assert_newest(run, 4)
    assert not list(run.checkpoints.glob("*.damaged-*"))
    if run.injected_fault(0).exists():
        assert injection(run).step in (1, 2, 3, 4)


def test_the_call_is_the_nth_and_a_full_disk_stays_full_for_one_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with FaultyDisk(run, {0: Fault(kind="no-space", rank=0, step=2, argument=4)}, last_step=0) as disk:
        save_step(run, 1)
        assert not run.injected_fault(0).exists()
        with pytest.raises(CheckpointError, match=r"No space left on device.*free space there"):
            save_step(run, 2)
        assert (injection(run).step, injection(run).mark) == (2, "write of rank-00000.bin")
        folder = run.checkpoints / "step-2.tmp-x"
        for name in ("open", "write", "fsync"):
            disk.before_call(name, str(folder))  # another save's
    assert run.checkpoint_steps() == [1]


def test_an_error_while_restoring_is_no_damage(tmp_path: Path) -> None:
    run = Run(tmp_path)
    save_step(run, 1)
    fault = Fault(kind="io-error", rank=0, step=2, phase="restore", argument=2)
    with FaultyDisk(run, {0: fault}, last_step=1):
        assert_newest(run, 1)  # step 2 was not finished yet
    with FaultyDisk(run, {0: fault}, last_step=2):
        with pytest.raises(CheckpointError, match="Input/output error"):
            load_newest(run, state_of(0))
        assert_newest(run, 1)
    with FaultyDisk(run, {0: fault}, last_step=2):
        assert_newest(run, 1)  # once only


def test_a_crash_is_by_sigkill_before_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    run = Run(tmp_path)
    with (
        FaultyDisk(run, {0: Fault(kind="crash", rank=0, phase="checkpoint", argument=1)}, 0),
        pytest.raises(CheckpointError),
    ):
        save_step(run, 1)  # not killed, it fails
    assert killed == [(os.getpid(), 9)]
    assert injection(run).mark.startswith("mkdir of step-1.tmp-")


def test_a_slow_disk_delays_each_call_of_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    run = Run(tmp_path)
    with FaultyDisk(run, {0: Fault(kind="slow-disk", rank=0, step=2, argument=0.5)}, 0):
        save_step(run, 1)
        assert not slept
        save_step(run, 2)
        num_calls = len(slept)
        save_step(run, 3)
    assert num_calls > 10
    assert slept == [0.5] * num_calls


def test_other_files_and_what_comes_after_are_as_ever(tmp_path: Path) -> None:
    run, real = Run(tmp_path / "run"), (io.open, os.fsync, os.rename)
    with FaultyDisk(run, {0: Fault(kind="io-error", rank=0, argument=1)}, 0):
        (tmp_path / "other").write_text("text", encoding="utf-8")
        assert (tmp_path / "other").read_text(encoding="utf-8") == "text"
        assert not run.injected_fault(0).exists()
    assert (io.open, os.fsync, os.rename) == real
