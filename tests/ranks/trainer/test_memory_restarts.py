"""Runs with copies in memory: a crash before the first checkpoint on disk, full memory, rollbacks and what is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import meshwright as mw
from meshwright.checkpoint.memory import copy_saver, memory_folder
from meshwright.checkpoint.memory.memory_folder import memory_folders, owner_of
from meshwright.spec.fault import Fault
from meshwright.spec.run.run import Run
from repository import ROOT
from run_ranks import run_ranks
from training_runs import SMALL, FinishedRun, tiny_job, train_on_ranks, train_on_this_rank

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (*SMALL, "train.steps=8", "checkpoint.interval=50", "checkpoint.memory_interval=1", "run.timeout_s=3")


def test_a_crash_before_any_checkpoint_on_disk_costs_no_step(tmp_path: Path) -> None:
    crash = Fault(kind="crash", rank=1, step=6, phase="backward")
    found = mw.chaos(JOB, *KEYS, f"checkpoint.memory_dir={tmp_path}", faults=[crash], ranks=2)
    assert found.holds, found.problems
    assert found.outcomes[0].lost_steps == 0
    assert list(tmp_path.iterdir()) == []


def memory_job(tmp_path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job of ten steps with a copy in memory after each, in a folder for each host name."""
    of_checkpoint = {"interval": 0, "memory_interval": 1, "memory_dir": str(tmp_path / "memory-{host}")}
    own = {"checkpoint": {**of_checkpoint, **sections.pop("checkpoint", {})}, "train": {"steps": 10}}
    return tiny_job(tmp_path, **own, **sections)


class _Crash(Exception):
    """What ends a rank of a test at a step."""


def train_on_node(job: dict[str, Any], folder: str, resume: bool, last_copy: int | None) -> str:
    """Train as a rank of a host of its own, and end as a crash does once the copy of a step was made."""
    rank = int(os.environ["RANK"])
    made = copy_saver.CopySaver.copy

    def copy(self: Any, step: int, *arguments: Any) -> Any:
        outcome = made(self, step, *arguments)
        if step == last_copy:
            raise _Crash
        return outcome

    names = patch("socket.gethostname", lambda: f"node{rank}")
    with names, patch.object(copy_saver.CopySaver, "copy", copy):
        try:
            return str(train_on_this_rank(job, folder, resume))
        except _Crash:
            return "crash"


def crash_after(step: int, job: dict[str, Any], folder: Path) -> None:
    assert run_ranks(train_on_node, 2, job, str(folder), False, step) == ["crash"] * 2


def resume(job: dict[str, Any], folder: Path, num_ranks: int = 2) -> FinishedRun:
    assert run_ranks(train_on_node, num_ranks, job, str(folder), True, None) == ["0"] * num_ranks
    return FinishedRun(folder, [0] * num_ranks)


def files_in(tmp_path: Path, rank: int) -> Iterator[Path]:
    return (tmp_path / f"memory-node{rank}").glob("meshwright-*/step-*/*")


@pytest.fixture
def straight(tmp_path: Path) -> str:
    """Return the parameter hash of the job without any copies."""
    job = memory_job(tmp_path, checkpoint={"memory_interval": 0})
    return train_on_ranks(job, tmp_path / "straight", 2).parameter_hash


@pytest.mark.long
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_node_that_lost_its_memory_gets_its_state_from_the_other(
    tmp_path: Path, straight: str, lost: int | None
) -> None:
    job = memory_job(tmp_path)
    crash_after(7, job, tmp_path / "run")
    for path in [] if lost is None else list(files_in(tmp_path, lost)):
        path.unlink()
    finished = resume(job, tmp_path / "run")
    assert finished.manifest.attempts[1].start_step == 7
    assert finished.parameter_hash == straight
    assert not any(list((tmp_path / f"memory-node{rank}").iterdir()) for rank in (0, 1))


@pytest.mark.long
def test_another_number_of_ranks_reads_the_copy(tmp_path: Path) -> None:
    job = memory_job(tmp_path)
    crash_after(7, job, tmp_path / "run")
    finished = resume(job, tmp_path / "run", num_ranks=1)
    assert finished.manifest.attempts[1].start_step == 7


@pytest.mark.long
def test_with_both_memories_lost_or_damaged_the_disk_is_read(tmp_path: Path, straight: str) -> None:
    job = memory_job(tmp_path, checkpoint={"interval": 4})
    crash_after(7, job, tmp_path / "run")
    for rank in (0, 1):
        for path in files_in(tmp_path, rank):
            if path.suffix == ".bin":
                content = bytearray(path.read_bytes())
                content[len(content) // 3] ^= 4
                path.write_bytes(content)
    finished = resume(job, tmp_path / "run")
    assert finished.manifest.attempts[1].start_step == 4
    assert finished.parameter_hash == straight


@pytest.mark.long
def test_full_memory_is_one_warning_and_no_end_of_training(tmp_path: Path) -> None:
    found = mw.chaos(
        JOB,
        *KEYS[:-3],
        "checkpoint.interval=3",
        "checkpoint.memory_interval=1",
        "checkpoint.memory_dir=/proc",
        "run.timeout_s=3",
        faults=[Fault(kind="crash", rank=1, step=6, phase="backward")],
        ranks=2,
    )
    assert found.holds, found.problems
    assert found.outcomes[0].lost_steps == 2


@pytest.mark.long
def test_what_a_dead_run_left_in_memory_is_listed_and_removed(tmp_path: Path) -> None:
    job = memory_job(tmp_path, checkpoint={"memory_dir": str(tmp_path / "memory")})
    assert run_ranks(train_on_node, 1, job, str(tmp_path / "run"), False, 7) == ["crash"]
    owner = owner_of(Run(tmp_path / "run"))
    assert owner is not None
    [record] = mw.checkpoints.ls(tmp_path / "run").in_memory
    assert (record.state, record.steps) == ("left", [7])
    assert "after step 7" in str(mw.checkpoints.ls(tmp_path / "run"))
    kept = mw.checkpoints.gc(tmp_path / "run")
    assert "step 7 by them" in kept.spared[0].reason
    assert mw.checkpoints.gc(tmp_path / "run", memory=True, dry_run=True).removals
    memory_folder.new_owner(Run(tmp_path / "run"))  # as --overwrite does
    [record] = mw.checkpoints.ls(tmp_path / "run").in_memory
    assert record.state == "orphaned"
    [removed] = mw.checkpoints.gc(tmp_path / "run").removals
    assert removed.name == record.folder
    assert not list(memory_folders(str(tmp_path / "memory")))


@pytest.mark.long
def test_nodes_that_share_a_folder_make_no_copies(tmp_path: Path, straight: str) -> None:
    job = memory_job(tmp_path, checkpoint={"memory_dir": str(tmp_path / "memory")})
    assert run_ranks(train_on_node, 2, job, str(tmp_path / "run"), False, None) == ["0"] * 2
    assert FinishedRun(tmp_path / "run", [0, 0]).parameter_hash == straight
    assert not list(tmp_path.glob("memory/*/step-*"))


@pytest.mark.long
def test_a_stop_that_saves_to_disk_leaves_no_copy(tmp_path: Path) -> None:
    stop = Fault(kind="terminate", rank=0, step=5, phase="optimizer")
    found = mw.chaos(JOB, *KEYS, f"checkpoint.memory_dir={tmp_path}", faults=[stop], ranks=2)
    assert found.holds, found.problems
    assert list(tmp_path.iterdir()) == []
