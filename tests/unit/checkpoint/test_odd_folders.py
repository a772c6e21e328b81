"""Folders that are not what their names say: none is listed as complete, and none costs a good checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright.checkpoint.format.durable
from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.examine.describe_run import describe_run
from meshwright.checkpoint.prune import garbage_of, remove_all
from meshwright.checkpoint.reshard import reshard
from meshwright.errors import ConfigError
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run

RULE = RetentionRule(keep=1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    for step in (8, 10, 12):
        save(run.checkpoint(step), {"model": {"w": torch.full((4,), float(step))}}, {"step": step})
    return run


@pytest.mark.parametrize("damage", ["empty manifest", "longer manifest", "dangling link", "other step"])
def test_a_damaged_newest_keeps_the_one_before(run: Run, damage: str) -> None:
    newest = run.checkpoint(12)
    manifest = newest / "rank-00000.json"
    if damage == "empty manifest":
        manifest.write_text("")
    elif damage == "longer manifest":
        manifest.write_text(manifest.read_text() + " ")
    elif damage == "dangling link":
        (newest / "rank-00000.bin").unlink()
        (newest / "rank-00000.bin").symlink_to("nowhere")
    else:
        newest.rename(run.checkpoint(20))
    states = {one.name: one.state for one in describe_run(run, RULE, is_running=False)}
    assert states.pop("step-20" if damage == "other step" else "step-12") == "damaged"
    assert set(states.values()) == {"complete"}
    removals, _ = garbage_of(run, RULE, is_running=False, with_damaged=False)
    assert [one.name for one in removals] == ["step-8"]


def test_what_could_not_be_removed_is_not_reported_as_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(1, "not permitted", str(folder))

    monkeypatch.setattr(meshwright.checkpoint.format.durable.shutil, "rmtree", refuse)
    removals, _ = garbage_of(run, RULE, is_running=False, with_damaged=False)
    gone, left = remove_all(run, removals)
    assert gone == []
    assert [one.reason for one in left] == ["retention keeps it no longer: could not be removed"] * 2


@pytest.mark.parametrize(("name", "num_ranks"), [("step-99", 2), ("step-12", 0), ("copy", -1)])
def test_a_copy_that_cannot_be_right_is_not_written(run: Run, tmp_path: Path, name: str, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"must be 1 or more|named for another step .*name it step-12"):
        reshard(run.checkpoint(12), tmp_path / name, num_ranks)
    assert not (tmp_path / name).exists()
