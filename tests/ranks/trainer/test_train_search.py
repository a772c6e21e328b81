"""`layout.search = true`: the launcher settles the layout, the manifest says what was expected, a resume keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.spec.run.layout_plan import Plan
from meshwright.spec.run.run import Manifest

DEVICE = """
title = "one core of a test"
vendor = "any"
is_host = true
memory_bytes = { value = "8 GB", source = "guess" }
memory_bytes_per_s = { value = "5 GB/s", source = "guess" }

[dense_flops_per_s]
float32 = { value = "50 GFLOP/s", source = "guess" }
"""
CLUSTER = """
title = "two cores of a test"
device = "cpu-local"
num_devices = 2
devices_per_node = 2
source = "guess"

[intra_node]
name = "gloo"
bytes_per_s = { value = "1 GB/s", source = "guess" }
"""
SOURCE = """
[sources.guess]
title = "a test"
date = "2026-11"
kind = "measured"
"""
JOB = """
[model]
source = "llama-1m"
[train]
steps = 2
seq_len = 32
global_batch_size = 4
[layout]
search = true
tp = 1
[checkpoint]
interval = 1
[run]
device = "cpu"
dir = "run"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that searches for its layout, next to a catalogue in which this machine was measured."""
    for kind, text in (("devices", DEVICE), ("clusters", CLUSTER)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "cpu-local.toml").write_text(text + SOURCE)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def meshwright(job: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "meshwright", arguments[0], str(job), *arguments[1:]]
    environment = os.environ | {"MESHWRIGHT_CATALOGUE": str(job.parent)} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=job.parent, env=environment)
    return done.returncode, done.stdout, done.stderr


def manifest(job: Path) -> Manifest:
    return Manifest.from_json((job.parent / "run" / "manifest.json").read_text())


@pytest.mark.long
def test_the_launcher_takes_the_planners_pick_and_a_resume_keeps_it(job: Path) -> None:
    code, text, _ = meshwright(job, "plan", "--json")
    assert code == 0
    pick = Plan.from_dict(json.loads(text)).pick
    code, _, errors = meshwright(job, "train", "train.stop_after=1")
    assert code == 75, errors
    assert "expected to take" in errors
    first = manifest(job)
    # Where the stages are cut is settled when the model is there.
    assert first.attempts[0].layout.replace(stage_boundaries=None) == pick.layout
    assert first.estimate == pick.estimate
    # Other keys are set now, and a new search would find another layout.
    job.write_text(JOB.replace("tp = 1", "tp = 2"))
    code, _, errors = meshwright(job, "train", "--resume")
    assert code == 0, errors
    second = manifest(job)
    assert second.attempts[1].layout == first.attempts[0].layout
    assert second.estimate == first.estimate
    code, _, errors = meshwright(job, "train", "--resume", "--ranks", "1")
    assert code == 2
    assert "has a layout of 2 ranks, which a resume keeps" in errors


def test_ranks_that_torchrun_started_cannot_settle_it(job: Path) -> None:
    code, _, errors = meshwright(job, "train", RANK="0", WORLD_SIZE="2")
    assert code == 2
    assert "settled once, before any rank starts, but torchrun started them already" in errors
    assert f"`meshwright plan {job} --write` puts the layout into the job" in errors


@pytest.mark.long
def test_a_machine_that_nobody_measured_cannot_be_planned_for(job: Path) -> None:
    (job.parent / "clusters" / "cpu-local.toml").unlink()
    code, _, errors = meshwright(job, "train")
    assert code == 2
    assert "has no matmul rate at all in the catalogue: `meshwright calibrate` measures this machine's" in errors


def test_check_says_who_chooses_the_layout(job: Path) -> None:
    code, text, errors = meshwright(job, "check")
    assert code == 0, errors
    assert "chosen by the planner when training starts" in text
