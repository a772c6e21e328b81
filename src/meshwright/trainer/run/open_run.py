"""Opens the run folder for an attempt: who runs, on what, from which step."""

from __future__ import annotations

import os
import shutil
import socket

from meshwright.checkpoint.hf.side_files import keep_side_files
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Attempt, Manifest, Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.run.provenance import git_commit, versions
from meshwright.trainer.run.recorder import Recorder
from meshwright.trainer.run.run_folder import (
    ManifestKeeper,
    hold,
    now,
    read_manifest,
    require_same_run,
    set_aside,
    write_atomically,
)
from meshwright.trainer.step.speed import SpeedLimit
from meshwright.trainer.step.training import Training


def claim(run: Run, job: Job, *, resume: bool, overwrite: bool) -> None:
    """Make sure that this job may write into the run folder, and that until this process ends no other does.

    Raises ConfigError for another's run, Retryable for one that is still being written.
    """
    if overwrite:
        set_aside(run)
    if run.manifest.exists() and not resume:
        raise ConfigError(
            f"the run folder {run.folder} already holds a run: continue it with --resume, "
            "choose another run.dir, or rename it out of the way with --overwrite"
        )
    for change in require_same_run(run, job):
        logger.warning("changed since the run began: %s", change)
    for folder in (run.folder, run.checkpoints, run.logs):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create {folder}: {error.strerror}: set run.dir to a folder you can write"
            ) from error
    hold(run)
    # What an earlier attempt said of itself would be taken for this one's.
    for folder in (run.heartbeats, run.hangs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


def open_recorder(
    training: Training, run: Run, start_step: int, speed: SpeedLimit, estimate: Estimate | None = None
) -> Recorder | None:
    """Return rank 0's recorder with this attempt in the manifest, None on the other ranks; a collective.

    `estimate` is what the planner expects, where it chose the layout.
    """
    places = training.ranks.gather((os.getpid(), socket.gethostname()))
    if not training.ranks.is_first:
        return None
    job = training.job
    attempt = Attempt(
        started_at=now(),
        start_step=start_step,
        pids=[pid for pid, _ in places],
        hosts=[host for _, host in places],
        layout=training.layout,
        versions=versions(),
        git_commit=git_commit(),
    )
    previous = read_manifest(run)
    if estimate is None and previous and previous.attempts and previous.attempts[-1].layout == training.layout:
        estimate = previous.estimate
    manifest = Manifest(
        job=job,
        seed=job.train.seed,
        num_parameters=training.num_parameters,
        data=training.dataset.fingerprint,
        estimate=estimate,
        attempts=[*(previous.attempts if previous else []), attempt],
        results=previous.results if previous else {},
    )
    write_atomically(run.job, to_toml(job))
    keep_side_files(job, run)
    return Recorder(job, run, ManifestKeeper(run, manifest), speed.peak_name)
