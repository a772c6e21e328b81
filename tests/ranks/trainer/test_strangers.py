"""Runs whose every port strangers connect to, from start to end: no port is open to other machines, no bit changes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.write import to_toml
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from strangers import Strangers
from training_runs import tiny_job

NUM_CONNECTIONS = 50


def start(folder: Path, **sections: dict[str, Any]) -> tuple[Run, subprocess.Popen[str]]:
    folder.mkdir()
    run = Run(folder / "run")
    job = tiny_job(folder, **{"run": {"device": "cpu", "dir": str(run.folder), "timeout_s": 300.0}, **sections})
    (folder / "job.toml").write_text(to_toml(Job.from_dict(job)))
    command = [sys.executable, "-m", "meshwright", "train", str(folder / "job.toml"), "--ranks", "2"]
    return run, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def hash_of(run: Run, process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    manifest = Manifest.from_json(run.manifest.read_text())
    assert len(manifest.attempts) == 1, output
    return str(manifest.results["parameter_hash"])


def wait_for_a_step(run: Run, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if run.metrics.exists() and any(json.loads(row)["step"] for row in run.metrics.read_text().splitlines()[:1]):
            return
        time.sleep(0.02)


def train_among_strangers(folder: Path, **sections: dict[str, Any]) -> Strangers:
    """Check that a run among strangers ends with the parameters of one by itself, without a restart."""
    expected = hash_of(*start(folder / "alone", **sections))
    run, process = start(folder / "among", **sections)
    strangers = Strangers(process.pid, NUM_CONNECTIONS)
    with strangers.active():
        wait_for_a_step(run, process)
        strangers.are_connected = True
        found = hash_of(run, process)
    assert found == expected
    assert {host for host, _ in strangers.addresses} == {"127.0.0.1"}
    return strangers


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_of_ranks_that_share_a_process_group(tmp_path: Path) -> None:
    """Gloo's ports are all there are, and accept connections only while ranks connect."""
    strangers = train_among_strangers(tmp_path, train={"steps": 400}, layout={"dp_shard": 2})
    assert len(strangers.addresses) >= 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_with_saves_in_the_background(tmp_path: Path) -> None:
    strangers = train_among_strangers(
        tmp_path, train={"steps": 400}, layout={"dp_shard": 2}, checkpoint={"interval": 10, "mode": "async"}
    )
    # That of the writer processes, at least.
    assert strangers.answered
    assert strangers.num_accepted >= NUM_CONNECTIONS


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_of_independent_replicas(tmp_path: Path) -> None:
    strangers = train_among_strangers(
        tmp_path,
        train={"steps": 400, "exact_elastic": True},
        layout={"dp_replicate": 2, "dp_shard": 1},
        replicas={"independent": True},
    )
    # The coordinator's.
    assert strangers.answered
    assert strangers.num_accepted >= NUM_CONNECTIONS
