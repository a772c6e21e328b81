"""The benchmark of peers: its rounds, what it keeps and what it calls comparable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.rank_processes import RankFailed
from benchmarks.peers.results import Results, paired_ratio, rows_of
from benchmarks.peers.rounds import NUM_WARM_UP, Program, measure
from repository import ROOT

_SETTING = {"size": "none"}


def _program(name: str, *arguments: str) -> Program:
    command = (sys.executable, str(ROOT / "tests" / "helpers" / "programs" / "turn_taker.py"), *arguments)
    return Program(name, command, {**os.environ, "PYTHONPATH": str(ROOT)})


_ALIKE, _SAME, _OTHER = _program("alike", "3.0"), _program("same", "3.0001"), _program("other", "3.1")
_FAILING = _program("failing", "3.0", "2")


def test_rounds_are_kept_and_continued_and_ways_judged_by_their_losses(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results = Results.kept(file, _SETTING)
    measure([_ALIKE, _SAME, _OTHER, _FAILING], tmp_path, 2, results, 2, lambda: results.write(file))
    assert "no more of this" in results.failures["failing"]
    again = Results.kept(file, _SETTING)
    assert again.rounds == results.rounds
    measure([_ALIKE, _SAME, _OTHER], tmp_path, 2, again, 3, lambda: again.write(file))
    assert len(json.loads(file.read_text())["rounds"]) == 3
    assert again.rounds[:2] == results.rounds
    # The second time two ranks trained from the first step again, for fewer steps: the longer losses stay.
    assert again.losses["alike"] == [3.0 / step for step in range(1, NUM_WARM_UP + 3)]
    rows = {row.name: row for row in rows_of(again, "alike")}
    assert {name: row.is_comparable for name, row in rows.items()} == {"alike": True, "same": True, "other": False}
    assert paired_ratio(again, "alike", "alike", 0) == 1


def test_results_of_another_setting_are_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results(_SETTING, [{"alike": [1.0, 2.0]}]).write(file)
    assert Results.kept(file, {"size": "other"}).rounds == []


def test_no_way_that_starts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="no more of this"):
        measure([_program("failing", "3.0", "1")], tmp_path, 2, Results(_SETTING), 1, lambda: None)


@pytest.mark.long
def test_ours_and_accelerate_find_the_same_losses(tmp_path: Path) -> None:
    ways = ("ours, DDP", "ours, FSDP2", "accelerate, DDP", "transformers, FSDP2", "HF Trainer, DDP")
    options = [option for way in ways for option in ("--way", way)]
    out = tmp_path / "results.json"
    command = (sys.executable, "-m", "benchmarks.peers", "--here", "--size", "toy", "--rounds", "2", "--out", str(out))
    ended = subprocess.run((*command, *options), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    results = Results(**json.loads(out.read_text()))
    assert not results.failures
    rows = rows_of(results, "accelerate, DDP")
    assert [row.name for row in rows] == list(ways)
    assert all(row.is_comparable for row in rows), rows
