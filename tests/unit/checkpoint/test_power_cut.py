"""A save survives a power cut at any moment: what was not flushed to the disk before a rename may be gone after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.checkpoint import load, save
from meshwright.errors import CheckpointError
from meshwright.spec.run.run import Run

STATE = {"model": {"weight": torch.arange(24.0).view(4, 6)}}


class PowerCut(BaseException):
    """Ends a save where the power goes."""


class Disk:
    """Follows which files and folders have been flushed, and cuts the power before the n-th flush or rename."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut_before: int | None = None) -> None:
        self.num_events, self.cut_before = 0, cut_before
        self.flushed: set[str] = set()
        self.unflushed_at_rename: list[str] = []
        fsync, rename = os.fsync, Path.rename

        def follow_fsync(descriptor: int) -> None:
            self._event()
            fsync(descriptor)
            self.flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

        def follow_rename(source: Path, target: Path) -> Path:
            self._event()
            contents = [source, *source.iterdir()] if source.is_dir() else [source]
            self.unflushed_at_rename += [str(path) for path in contents if str(path) not in self.flushed]
            self.flushed.discard(str(source.parent))
            return rename(source, target)

        monkeypatch.setattr(os, "fsync", follow_fsync)
        monkeypatch.setattr(Path, "rename", follow_rename)

    def _event(self) -> None:
        if self.num_events == self.cut_before:
            raise PowerCut
        self.num_events += 1


def test_everything_is_flushed_before_the_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    run = Run(tmp_path / "run")
    save(run.checkpoint(1), STATE, {"step": 1})
    assert disk.unflushed_at_rename == []
    # The name itself is durable once the folder that holds it is flushed after the rename.
    assert str(run.checkpoint(1).parent) in disk.flushed


def test_no_cut_leaves_a_checkpoint_that_loads_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        save(Run(tmp_path / "whole").checkpoint(1), STATE, {"step": 1})
    outcomes = set()
    for cut_before in range(disk.num_events):
        checkpoint = Run(tmp_path / f"cut-{cut_before}").checkpoint(1)
        with monkeypatch.context() as patch:
            Disk(patch, cut_before)
            # torch passes on whatever a writer raises as an exception of its own, ours as a CheckpointError.
            with pytest.raises((PowerCut, CheckpointError)):
                save(checkpoint, STATE, {"step": 1})
        outcomes.add(checkpoint.exists())
        if checkpoint.exists():
            found = {"model": {"weight": torch.zeros(4, 6)}}
            load(checkpoint, found)
            assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
        else:
            with pytest.raises(CheckpointError):
                load(checkpoint, {"model": {"weight": torch.zeros(4, 6)}})
    # Only the last cut, between the rename and the flush of the parent folder, comes after the commit.
    assert outcomes == {False, True}
