"""load_job: a job file with what overrides it."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.load import ResolvedJob
from meshwright.config.load import load_job as _load_job


def load_job(path: Path | str, *overrides: str) -> ResolvedJob:
    """Return the job of a file or a run folder, with `section.key=value` overrides; raises ConfigError with all that
    is wrong.
    """
    return _load_job(path, overrides)


def as_job(job: Path | str | ResolvedJob, overrides: tuple[str, ...] = ()) -> ResolvedJob:
    """Return a job that is given as a file or already loaded, with overrides."""
    if isinstance(job, ResolvedJob):
        return _load_job(job.path, (*job.overrides, *overrides)) if overrides else job
    return _load_job(job, overrides)
