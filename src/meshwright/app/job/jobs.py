"""load_job: a job file with what overrides it."""

from collections.abc import Callable, Collection, Sequence

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.job.cpu_training import trains_on_cpu
from meshwright.app.job.tried_fixes import fix_of_all, problems_between
from meshwright.config.load import Inspection, ResolvedJob, inspect_job, raise_problems
from meshwright.errors import ConfigError
from meshwright.hardware.choice import choose_cluster
from meshwright.spec.job.job import Job
from meshwright.spec.layout.attention_backend import CUDA_BACKENDS
from meshwright.spec.problem import Problem, distinct


@checked
def load_job(path: JobSource, *overrides: str, ranks: Positive | None = None) -> ResolvedJob:
    """Return the job of a file or a run folder, with `section.key=value` overrides; raises ConfigError with all that
    is wrong. What it suggests holds on `ranks` ranks, or devices, where they are given.
    """
    return as_job(path, overrides, ranks)


def as_job(
    job: JobSource, overrides: tuple[str, ...] = (), num_ranks: int | None = None, cluster: str | None = None
) -> ResolvedJob:
    """Return a job that is given as a file or already loaded, with overrides.

    What an error suggests holds on `num_ranks` ranks, or on those of `cluster`, a NAME:COUNT in place of the job's.
    """
    if isinstance(job, ResolvedJob) and not overrides:
        return job
    return _sound(inspect_job_of(job, overrides), num_ranks, cluster)


def job_here(job: JobSource, overrides: tuple[str, ...] = (), num_ranks: int | None = None) -> ResolvedJob:
    """Return a job that trains on this machine, as `as_job` does."""
    if isinstance(job, ResolvedJob) and not overrides:
        return job
    return _sound(inspect_job_here(job, overrides), num_ranks)


def _sound(inspection: Inspection, num_ranks: int | None, cluster: str | None = None) -> ResolvedJob:
    """Return the job; raises ConfigError with all that is wrong with it by itself, and between its keys."""
    if inspection.problems:
        resolved, unknown = inspection.resolved, inspection.unknown
        if cluster is not None:
            num_ranks, unknown = _num_devices(cluster), unknown | {"cluster"}
        found = [resolved.located(text) for text in problems_between(resolved, num_ranks, unknown)]
        raise_all(resolved, all_of(inspection, found), num_ranks, unknown)
    return inspection.resolved


def all_of(inspection: Inspection, found: Sequence[str]) -> list[str]:
    """Return what is wrong with a job by itself, and what else was `found`, without what follows from wrong keys.

    What layout.async_tp lacks is known with the job's device: where that was found, it replaces what was said without.
    """
    others = [text for text in found if not inspection.is_about_wrong(text)]
    is_known = any(_is_async_tp(text) for text in others)
    return [*(text for text in inspection.problems if not (is_known and _is_async_tp(text))), *others]


def _is_async_tp(text: str) -> bool:
    """Return whether a message, behind the place where the key is written, is about layout.async_tp."""
    return isinstance(text, Problem) and text.what.split(": ", 1)[-1].startswith("layout.async_tp ")


def inspect_job_here(job: JobSource, overrides: tuple[str, ...]) -> Inspection:
    """Return what can be read of a job that trains on this machine.

    Where that has no GPU and the attention asked for no kernel on a CPU, it is judged with run.device = "cpu": this is
    then the one thing wrong with its attention, whatever else the kernel needs.
    """
    inspection = inspect_job_of(job, overrides)
    found = inspection.resolved.job
    if found.layout.attention_backend in CUDA_BACKENDS and trains_on_cpu(found):
        return inspect_job_of(job, (*overrides, "run.device=cpu"))
    return inspection


def inspect_job_of(job: JobSource, overrides: tuple[str, ...]) -> Inspection:
    """Return what can be read of a job that is given as a file or already loaded, with overrides."""
    if isinstance(job, ResolvedJob):
        return inspect_job(job.path, (*job.overrides, *overrides))
    return inspect_job(job, overrides)


def raise_all(
    resolved: ResolvedJob,
    found: Sequence[str],
    num_ranks: int | None,
    unknown: Collection[str] = (),
    fits: Callable[[Job], bool] | None = None,
) -> None:
    """Raise one ConfigError with all that was `found` wrong with a job on `num_ranks` ranks; return if nothing was.

    Of several problems it says, too, which keys solve them all at once, where that is known.
    """
    problems, together = distinct(found), None
    if len(problems) > 1:
        between = problems_between(resolved, num_ranks, unknown)
        if {_what(resolved.located(problem)) for problem in between}.issuperset(map(_what, problems)):
            together = fix_of_all(resolved, num_ranks, unknown, fits)
    raise_problems(resolved.path, problems, together)


def _what(text: str) -> str:
    return text.what if isinstance(text, Problem) else text


def _num_devices(cluster: str) -> int | None:
    """Return COUNT of a NAME:COUNT; None where it is wrong, which is reported when the cluster is chosen."""
    try:
        return choose_cluster(cluster).num_devices
    except ConfigError:
        return None
