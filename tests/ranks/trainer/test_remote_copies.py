"""checkpoint.remote while training: uploads never stop it, survive a killed process, and restore an empty machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.checkpoint.background.step_worker import StepEnd, StepWorker
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.config.load import load_job
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Manifest, Run
from s3_server import s3_server
from training_runs import tiny_job


def write_job(folder: Path, url: str) -> Path:
    job = Job.from_dict(
        tiny_job(
            folder,
            layout={"dp_shard": 1},
            checkpoint={"interval": 2, "keep": 1, "remote": url},
            run={"dir": str(folder / "run")},
        )
    )
    path = folder / "job.toml"
    path.write_text(to_toml(job))
    return path


def uploads(run: Run, url: str, rule: RetentionRule, now_s: Callable[[], float]) -> StepWorker:
    options = {"url": url, "rule": rule.to_dict(), "niceness": 0}
    return StepWorker(run, "meshwright.checkpoint.remote.upload", options, run.checkpoint_steps(), now_s)


def wait_for(uploader: StepWorker, num_ends: int) -> list[StepEnd]:
    ended: list[StepEnd] = []
    while len(ended) < num_ends:
        ended += uploader.poll()
        time.sleep(0.02)
    return ended


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_run_goes_on_from_its_remote_copy_on_an_empty_machine(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "s3":
        with s3_server() as (bucket, environment):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            go_on_elsewhere(tmp_path, f"s3://{bucket}/run")
    else:
        go_on_elsewhere(tmp_path, f"file://{tmp_path}/remote")


def go_on_elsewhere(folder: Path, url: str) -> None:
    """Train to step 4 with copies at `url`, lose the run folder, and go on; compare with a run that never stopped."""
    path = write_job(folder, url)
    run = Run(folder / "run")
    assert mw.train(path, "train.stop_after=4").exit_code == 75
    results = Manifest.from_json(run.manifest.read_text()).results
    assert results["remote"]["newest_step"] == 4
    assert results["remote"]["waiting_steps"] == []
    assert RemoteStore(url).steps() == [4]
    shutil.rmtree(run.folder)
    with pytest.raises(ConfigError, match="already holds 1 checkpoint, the newest after step 4"):
        mw.train(path)
    assert mw.resume(path).exit_code == 0
    manifest = Manifest.from_json(run.manifest.read_text())
    assert [attempt.start_step for attempt in manifest.attempts] == [0, 4]
    assert RemoteStore(url).steps() == [6]
    assert mw.train(path, f"run.dir={folder}/whole", "checkpoint.remote=none").exit_code == 0
    whole = Manifest.from_json(Run(folder / "whole").manifest.read_text())
    assert manifest.results["parameter_hash"] == whole.results["parameter_hash"]


@pytest.mark.slow
def test_a_remote_that_vanishes_does_not_stop_training_and_is_not_forgotten(tmp_path: Path) -> None:
    path = write_job(tmp_path, f"file://{tmp_path}/remote")
    (tmp_path / "remote").mkdir()
    run = Run(tmp_path / "run")
    assert mw.train(path, "train.stop_after=2").exit_code == 75
    (tmp_path / "remote").rename(tmp_path / "unmounted")
    uploader = uploads(run, f"file://{tmp_path}/remote", RetentionRule(keep=1), lambda: 0.0)
    [ended] = wait_for(uploader, 1)
    assert "is gone" in str(ended.error)
    assert uploader.results()["waiting_steps"] == [2]
    assert "is gone" in uploader.results()["last_error"]
    assert uploader.poll() == []  # not before its time
    uploader.close()
    assert not (tmp_path / "remote").exists()


@pytest.mark.long
def test_a_killed_upload_process_is_replaced(tmp_path: Path) -> None:
    path = write_job(tmp_path, f"file://{tmp_path}/remote")
    run = Run(tmp_path / "run")
    assert mw.train(path, "train.stop_after=2", "checkpoint.remote=none").exit_code == 75
    (tmp_path / "remote").mkdir()
    clock = [0.0]
    uploader = uploads(run, f"file://{tmp_path}/remote", RetentionRule(), lambda: clock[0])
    uploader.poll()
    assert uploader.in_use == [2]
    assert uploader.pid is not None
    os.kill(uploader.pid, signal.SIGKILL)
    [killed] = wait_for(uploader, 1)
    assert killed.error == "its process was killed by signal 9"
    clock[0] = 10.0
    [done] = wait_for(uploader, 1)
    assert done.error is None
    assert (uploader.newest, uploader.num_failed) == (2, 1)
    uploader.close()
    assert RemoteStore(f"file://{tmp_path}/remote").steps() == [2]


def test_memory_and_unknown_urls_are_refused_by_check(tmp_path: Path) -> None:
    path = write_job(tmp_path, "memory://run")
    with pytest.raises(ConfigError, match="is the memory of one process"):
        mw.check(load_job(path, []))
    with pytest.raises(ConfigError, match="is no URL that fsspec knows"):
        mw.check(path, "checkpoint.remote=nosuch://x")
    with pytest.raises(ConfigError, match="cannot be used"):
        mw.resume(path, f"checkpoint.remote=file://{tmp_path}/missing/remote")
    with pytest.raises(ConfigError, match="cannot be used"):
        mw.check(path, f"checkpoint.remote=file://{tmp_path}/missing/remote")
