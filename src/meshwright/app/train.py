"""train and resume: a job on the local ranks of this machine, each a process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.app.job_problems import check_job, run_folder
from meshwright.app.jobs import as_job
from meshwright.app.results.run_result import TrainedRun
from meshwright.config.load import ResolvedJob, raise_problems
from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Run
from meshwright.units import format_duration

if TYPE_CHECKING:
    from meshwright.trainer.launch.planned import Planned


def train(
    job: Path | str | ResolvedJob,
    *overrides: str,
    ranks: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    require_checkpoint: bool = False,
    tell: Callable[[str], None] = logger.info,
) -> TrainedRun:
    """Train `job` on local ranks; with layout.search = true, in the layout that `plan` picks. Return how it ended.

    `ranks` are the processes to start; None takes the layout's, or all CUDA devices. `resume` continues from the newest
    checkpoint of the run folder if there is one, and fails with `require_checkpoint` if there is none; `overwrite`
    renames an existing run folder out of the way. Raises ConfigError for a job, layout or run folder that cannot work,
    before any process starts. `tell` is called with what was chosen, and where an earlier run went.
    """
    if resume and overwrite:
        raise ConfigError("--resume continues the run folder and --overwrite replaces it: give one of them")
    resolved = as_job(job, overrides)
    _look_for_checkpoint(run_folder(resolved), resume=resume or require_checkpoint, required=require_checkpoint)
    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(resolved.folder))
    run = run_folder(resolved)
    resolved, num_ranks, planned = _settled(resolved, run, ranks, resume=resume, overwrite=overwrite)
    from meshwright.trainer.launch.launch import train_locally
    from meshwright.trainer.run.run_folder import require_same_run, set_aside

    if resume:
        require_same_run(run, resolved.job)
    if overwrite and (aside := set_aside(run)):
        tell(f"the earlier run is now {aside}")
    with tempfile.TemporaryDirectory(prefix="meshwright-plan-") as folder:
        planned_file = [] if planned is None else ["--planned", _write_plan(planned, Path(folder), tell)]
        arguments = ["train", str(resolved.path), *planned_file, *resolved.overrides]
        exit_code = train_locally(resolved.job, run, num_ranks, arguments, resume=resume)
        return TrainedRun(run.folder, exit_code)


def resume(job: Path | str | ResolvedJob, *overrides: str, ranks: int | None = None) -> TrainedRun:
    """Continue training `job` from the newest checkpoint of its run folder; return the run and how it ended."""
    return train(job, *overrides, ranks=ranks, resume=True)


def _look_for_checkpoint(run: Run, *, resume: bool, required: bool) -> None:
    """Warn of, or with `required` refuse, a run that is to be resumed and has no checkpoint, such as a mistyped one."""
    if not resume or run.checkpoint_steps():
        return
    if required:
        raise ConfigError(f"--require-checkpoint: {run.folder} holds no checkpoint: name the run's folder in run.dir")
    logger.warning("--resume: %s holds no checkpoint, so this run starts at step 0", run.folder)


def num_ranks_of(job: Job, asked: int | None) -> int:
    """Return the ranks to start: as asked, else what the layout needs, else every CUDA device, else 1."""
    if asked is not None:
        return asked
    if job.layout.rest_axis is None:
        return job.layout.num_ranks
    if job.run.device == "cpu":
        return 1
    from meshwright.trainer.launch.ranks import num_devices

    return num_devices(job.run)


def _settled(
    resolved: ResolvedJob, run: Run, ranks: int | None, *, resume: bool, overwrite: bool
) -> tuple[ResolvedJob, int, Planned | None]:
    """Return the job with nothing left open, the ranks to start, and what was chosen for them; raises ConfigError."""
    from meshwright.trainer.launch.planned import budget_layout, by_formula, plan_layout
    from meshwright.trainer.launch.ranks import require_devices

    planned = None
    if resolved.job.layout.search:
        from meshwright.app.simulated.simulated_plan import by_simulation

        raise_problems(resolved.path, check_job(resolved, None, resume=resume, overwrite=overwrite))
        choose = by_simulation if resolved.job.planner.simulate else by_formula
        planned = plan_layout(resolved, run, ranks, resume=resume, choose=choose)
        resolved = replace(resolved, job=planned.job(resolved.job))
    num_ranks = num_ranks_of(resolved.job, ranks)
    raise_problems(resolved.path, check_job(resolved, num_ranks, resume=resume, overwrite=overwrite))
    require_devices(resolved.job.run, num_ranks)
    if resolved.job.layout.activation_checkpoint == "auto":
        planned = budget_layout(resolved, run, num_ranks, resolved.overrides, resume=resume)
        resolved = replace(resolved, job=planned.job(resolved.job))
    return resolved, num_ranks, planned


def _write_plan(plan: Planned, folder: Path, tell: Callable[[str], None]) -> str:
    """Return a file with what was chosen, for the ranks, and tell it."""
    step_s = "" if plan.estimate is None else f", expected to take {format_duration(plan.estimate.step.total_s)} a step"
    tell(f"layout {layout_text(plan.layout)}{step_s}")
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return str(path)
