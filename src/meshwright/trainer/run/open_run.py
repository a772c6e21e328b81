"""Opening a run folder for an attempt: processes, versions, first step."""

import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile

import torch

from meshwright.checkpoint.hf.side_files import keep_side_files
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.evidence import read_heartbeats
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import module_dir
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.rank_records import LAST_PHASES
from meshwright.spec.run.run import Attempt, Manifest, Run
from meshwright.spec.run.run_events import append_event
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.run.run_folder import (
    ManifestFile,
    hold_alone,
    now,
    read_manifest,
    require_same_run,
    set_aside,
    write_atomically,
)
from meshwright.trainer.run.run_recorder import RunRecorder
from meshwright.trainer.step.training import Training


def claim(run: Run, job: Job, *, resume: bool, overwrite: bool) -> int:
    """Lock the run folder for this process and check that this job may write into it; return what holds the lock.

    It is a descriptor: who trains no more, and does not end, closes it.
    Ranks that an earlier launch left here are gone then. Raises ConfigError for the folder of another run, Retryable
    while another process writes into it.
    """
    if overwrite:
        set_aside(run, job.run.grace_s)
    if run.manifest.exists() and not resume:
        raise ConfigError(
            f"the run folder {run.folder} already holds a run: continue it with --resume, "
            "choose another run.dir, or rename it out of the way with --overwrite"
        )
    for change in require_same_run(run, job):
        logger.warning("changed since the run began: %s", change)
    for folder in (run.folder, run.checkpoints, run.logs):
        _require_writable(folder)
    _require_folders(run)
    held = hold_alone(run, job.run.grace_s)
    _note_start(run)
    # Files of an earlier attempt must not be read as this one's.
    for folder in (run.heartbeats, run.hangs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return held


def _require_writable(folder: Path) -> None:
    """Create a folder where there is none; raises ConfigError where it, or a file in it, cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"cannot create the folder {folder}, a file is in the way: move it away, or set run.dir to another folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}: set run.dir to a folder you can write") from error
    try:
        # Of a run that is resumed it is there, and may be another user's: the first save would come minutes later.
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder}: {error.strerror}: change its permissions, or set run.dir to a folder you can "
            "write"
        ) from error


def _require_folders(run: Run) -> None:
    """Raise ConfigError for a file in the place of a checkpoint: a save of that step would come upon it."""
    for path in sorted(run.checkpoints.glob("step-*")):
        if path.name.removeprefix("step-").isdigit() and not path.is_dir():
            raise ConfigError(f"{path} is no folder, as a checkpoint is: move it away, then start again with --resume")


def _note_start(run: Run) -> None:
    """Write to the run's events that an attempt began, and when one before that did not end by itself was last seen."""
    seen_s = [time_s for folder in (run, *run.replicas()) if (time_s := _last_seen_s(folder)) is not None]
    if seen_s:
        append_event(run, "last seen", time_s=max(seen_s))
    append_event(run, "started")


def _last_seen_s(folder: Run) -> float | None:
    """Return when ranks that share a folder last made progress; None where there are none, or all ended."""
    beats = [one for one in read_heartbeats(folder).values() if one.phase != "ended"]
    alive = [one for one in beats if one.phase not in LAST_PHASES] or beats
    return max((one.time_s for one in alive), default=None)


def open_recorder(
    training: Training, run: Run, start_step: int, estimate: Estimate | None = None
) -> RunRecorder | None:
    """Return rank 0's recorder with this attempt in the manifest, None on the other ranks; a collective.

    `estimate` is the planner's prediction, if it chose the layout.
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
    if previous and previous.attempts and previous.attempts[-1].layout != training.layout:
        layouts = (previous.attempts[-1].layout, training.layout)
        ranks = (f"{one.num_ranks} ({layout_text(one)})" for one in layouts)
        logger.warning("changed since the last attempt: the ranks were %s, are %s", *ranks)
    if estimate is None and previous and previous.attempts[-1].layout == training.layout:
        estimate = previous.estimate
    manifest = Manifest(
        job=job,
        module_dir=module_dir(job.model.source),
        seed=job.train.seed,
        num_parameters=training.num_parameters,
        data=training.dataset.fingerprint,
        estimate=estimate,
        attempts=[*(previous.attempts if previous else []), attempt],
        results=previous.results if previous else {},
    )
    write_atomically(run.job, to_toml(job))
    keep_side_files(job, run)
    return RunRecorder(job, run, ManifestFile(run, manifest))


PACKAGES = ("meshwright", "numpy", "pydantic", "safetensors", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and each package that is installed."""
    # torch.__version__ includes the build, +cpu or +cu130, unlike the package metadata.
    found = {"python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the working directory's commit, with a + if files differ from it; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True, timeout=10).stdout.strip()
