"""`mw.checkpoints` and `meshwright checkpoint`: views, exit codes, and what garbage collection must not remove."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.checkpoint import save
from meshwright.cli.main import run as run_command
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import CheckpointSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.run.run_folder import hold

STATE: dict[str, Any] = {"model": {"embedding.weight": torch.arange(12.0).view(3, 4)}}
DEAD = f"step-40.tmp-{'0' * 32}"
ASIDE = f"step-15.damaged-{'0' * 32}"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that keeps one checkpoint, and has three, a dead save and a damaged one that was set aside."""
    run = Run(tmp_path / "run")
    job = Job(checkpoint=CheckpointSection(keep=1, keep_every=20))
    for step in (10, 20, 30):
        save(run.checkpoint(step), STATE, {"step": step, "layout": Layout(dp_shard=2).to_dict()})
    run.manifest.write_text(Manifest(job=job, seed=0, num_parameters=12).to_json())
    (run.checkpoints / DEAD).mkdir()
    (run.checkpoints / DEAD / "rank-00000.bin").write_bytes(b"half")
    (run.checkpoints / ASIDE).mkdir()
    return run


def names_of(run: Run) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()}


def test_ls_says_what_is_kept_and_why(run: Run) -> None:
    listing = mw.checkpoints.ls(run.folder)
    assert [(one.step, one.state, one.kept_because) for one in listing.checkpoints] == [
        (10, "complete", []),
        (15, "set aside", []),
        (20, "complete", ["keep_every"]),
        (30, "complete", ["keep"]),
        (40, "leftover", []),
    ]
    table = listing.table(width=80)
    assert "nothing: gc removes it" in table
    assert "dp_shard=2" in table
    assert max(map(len, table.splitlines())) <= 80


def test_gc_removes_dead_saves_and_what_retention_dropped(run: Run) -> None:
    before = names_of(run)
    dry = mw.checkpoints.gc(run.folder, dry_run=True)
    assert names_of(run) == before
    assert {one.name for one in dry.removals} == {"step-10", DEAD}
    assert {one.name for one in mw.checkpoints.gc(run.folder).removals} == {"step-10", DEAD}
    assert names_of(run) == before - {"step-10", DEAD}
    assert [one.name for one in mw.checkpoints.gc(run.folder, damaged=True).removals] == [ASIDE]
    assert names_of(run) == {"step-20", "step-30"}


def test_gc_leaves_a_run_alone_whose_folder_is_locked(run: Run) -> None:
    before = names_of(run)
    descriptor = hold(run)
    try:
        found = mw.checkpoints.gc(run.folder)
    finally:
        os.close(descriptor)
    assert found.removals == []
    assert {one.name for one in found.spared} == {"step-10", DEAD, ASIDE}
    assert names_of(run) == before


def test_gc_leaves_a_run_alone_that_has_a_live_rank(run: Run) -> None:
    heartbeat = HeartbeatFile(run, 0, 1)
    heartbeat.mark("checkpoint", 40)
    assert mw.checkpoints.gc(run.folder).removals == []
    assert mw.checkpoints.ls(run.folder).checkpoints[-1].state == "being written"
    heartbeat.mark("ended")
    heartbeat.close()
    assert {one.name for one in mw.checkpoints.gc(run.folder).removals} == {"step-10", DEAD}


def test_a_damaged_checkpoint_ends_verify_with_70(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoint", "verify", str(run.folder), "--all"]) == 0
    path = run.checkpoint(30) / "rank-00000.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="70"):
        run_command(["checkpoint", "verify", str(run.folder), "--json"])
    [checkpoint] = json.loads(capsys.readouterr().out)["checkpoints"]
    [damage] = checkpoint["damages"]
    assert (damage["rank"], damage["file"], damage["start"]) == (0, "rank-00000.bin", 0)
    assert damage["tensor"].startswith("model/embedding.weight")
    assert run_command(["checkpoint", "verify", str(run.folder), "--step", "20"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "RUN"],
        ["verify", "RUN"],
        ["inspect", "RUN"],
        ["diff", "RUN", "RUN"],
        ["gc", "RUN", "--dry-run"],
        ["reshard", "RUN", "OUT", "--ranks", "2"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_has_a_table_and_json(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def words(out: str) -> list[str]:
        places = {"RUN": str(run.folder), "OUT": str(run.folder.parent / out)}
        return ["checkpoint", *(places.get(word, word) for word in arguments)]

    assert run_command(words("first")) == 0
    assert capsys.readouterr().out
    assert run_command([*words("second"), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_what_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        mw.checkpoints.ls(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint of step 7"):
        mw.checkpoints.verify(run.folder, step=7)
    assert run_command(["checkpoint", "verfy", str(run.folder)]) == 2


def test_a_tensor_is_found_by_its_own_name(run: Run) -> None:
    found = mw.checkpoints.inspect(run.folder, "embedding.weight")
    assert "max 11, mean 5.5" in found.table()


def test_keep_best_needs_a_validation_loss() -> None:
    job = Job(checkpoint=CheckpointSection(keep_best=2))
    [problem] = job.problems()
    assert "checkpoint.keep_best = 2 keeps those of the lowest validation loss" in problem
    assert "train.validation_interval = 0" in problem
    for interval, is_valid in ((50, True), (30, False), (100, True)):
        assert (job.replace(train=job.train.replace(validation_interval=interval)).problems() == []) is is_valid


@pytest.mark.parametrize("width", [60, 80])
def test_no_table_is_wider_than_the_terminal(run: Run, width: int) -> None:
    path = run.checkpoint(30) / "rank-00000.bin"
    intact, damaged = path.read_bytes(), b"\xff" * 48
    results = [
        mw.checkpoints.ls(run.folder),
        mw.checkpoints.gc(run.folder, dry_run=True),
        mw.checkpoints.inspect(run.folder),
        mw.checkpoints.inspect(run.folder, "embedding.weight"),
        mw.checkpoints.diff(run.checkpoint(10), run.checkpoint(20)),
        mw.checkpoints.reshard(run.folder, run.folder.parent / "copy", ranks=2),
    ]
    path.write_bytes(damaged)
    results.append(mw.checkpoints.verify(run.folder))
    path.write_bytes(intact)
    for result in results:
        assert max(map(len, result.table(width=width).splitlines())) <= width
        assert repr(result).startswith("<")
