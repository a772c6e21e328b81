"""load_job: a job file with what overrides it."""

from meshwright.app.arguments import JobSource, checked
from meshwright.config.load import ResolvedJob
from meshwright.config.load import load_job as _load_job


@checked
def load_job(path: JobSource, *overrides: str) -> ResolvedJob:
    """Return the job of a file or a run folder, with `section.key=value` overrides; raises ConfigError with all that
    is wrong.
    """
    return as_job(path, overrides)


def as_job(job: JobSource, overrides: tuple[str, ...] = ()) -> ResolvedJob:
    """Return a job that is given as a file or already loaded, with overrides."""
    if isinstance(job, ResolvedJob):
        return _load_job(job.path, (*job.overrides, *overrides)) if overrides else job
    return _load_job(job, overrides)
