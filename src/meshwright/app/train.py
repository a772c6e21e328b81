"""train and resume: a job on local ranks, each a process, or as one of the ranks that torchrun started."""

import logging
import os
import sys
from dataclasses import replace

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.cuda import local_gpu, with_local_gpu
from meshwright.app.job.cpu_training import int8_note
from meshwright.app.job.initial_weights import tokenizer_note
from meshwright.app.job.job_problems import check_job, layout_problems_of, run_folder
from meshwright.app.job.jobs import job_here, raise_all
from meshwright.app.job.remote_checkpoints import fetch_if_empty
from meshwright.app.job.settle_float8 import settle_float8_for_training
from meshwright.app.job.summary import precision_note
from meshwright.app.reports.report import short_report
from meshwright.app.results.run_result import TrainedRun
from meshwright.config.load import ResolvedJob, raise_problems
from meshwright.errors import ConfigError, ExitCode
from meshwright.garbage import kept_garbage
from meshwright.log import log_level, logger, progress
from meshwright.spec.job.job import Job
from meshwright.spec.layout.attention_backend import CUDA_BACKENDS
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.launch.local.rank_fork_server import fork_server
from meshwright.trainer.launch.rank import RankConfig, train_rank
from meshwright.units import counted, format_duration


@checked
def train(
    job: JobSource,
    *overrides: str,
    ranks: Positive | None = None,
    resume: bool = False,
    overwrite: bool = False,
    require_checkpoint: bool = False,
) -> TrainedRun:
    """Train `job` on local ranks; with layout.search = true, in the layout that `plan` picks. Return how it ended.

    `ranks` are the processes to start; None takes the layout's, or all CUDA devices. `resume` continues from the newest
    checkpoint of the run folder if there is one, and fails with `require_checkpoint` if there is none; `overwrite`
    renames an existing run folder out of the way. Raises ConfigError for a job, layout or run folder that cannot work,
    before any process starts; a class of your own that fails when it is built ends with exit code 2.
    """
    _refuse_both(resume=resume, overwrite=overwrite)
    resolved = job_here(job, overrides, ranks)
    run = run_folder(resolved)
    resume = resume or require_checkpoint
    fetch_if_empty(resolved.job, run, resume=resume)
    _look_for_checkpoint(run, resume=resume, required=require_checkpoint)
    _refuse_no_step(resolved.job, run, resume=resume)
    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(resolved.folder))
    resolved, num_ranks, estimate = settled(resolved, ranks, resume=resume, overwrite=overwrite)
    with kept_garbage():
        from meshwright.trainer.launch.launch import train_locally
        from meshwright.trainer.run.run_folder import require_same_run, set_aside

    if resume:
        require_same_run(run, resolved.job)
    if overwrite and (aside := set_aside(run, resolved.job.run.grace_s)):
        progress.info("the earlier run is now %s", aside)
    if (note := tokenizer_note(resolved)) is not None:
        logger.warning("%s", note)
    progress.info("starting %s", counted(num_ranks, "rank"))
    exit_code = train_locally(_rank_config(resolved, resume=resume, estimate=estimate), num_ranks)
    if exit_code is ExitCode.DONE:
        _log_waterfall(run)
    return TrainedRun(run.folder, exit_code)


@checked
def resume(job: JobSource, *overrides: str, ranks: Positive | None = None) -> TrainedRun:
    """Continue training `job`, a job file or a run folder, from its newest checkpoint; return how it ended.

    `ranks` are those of `train`: None takes the layout's, or all CUDA devices, as `train --resume` does, not as many as
    the run had; a checkpoint resumes on any number, to the same losses.
    """
    return train(job, *overrides, ranks=ranks, resume=True)


def train_under_torchrun(resolved: ResolvedJob, ranks: int | None, *, resume: bool, overwrite: bool) -> ExitCode:
    """Train a job as the rank that torchrun started this process as, and return its exit code.

    Raises ConfigError for what only a launcher settles: an open layout, or another number of ranks.
    """
    _refuse_both(resume=resume, overwrite=overwrite)
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"the environment has RANK={os.environ['RANK']} but no WORLD_SIZE, so this is no rank that torchrun "
            "started: unset RANK, or start the ranks with torchrun"
        )
    _refuse_open_layout(resolved)
    num_ranks = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != num_ranks:
        raise ConfigError(f"--ranks {ranks}, but torchrun started {num_ranks} ranks already: leave --ranks out")
    # Before any rank waits for another: torchrun starts ranks without a check.
    raise_problems(resolved.path, layout_problems_of(resolved, num_ranks))
    # The folder that a restart finds is the run's own.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if os.environ["RANK"] == "0":
        fetch_if_empty(resolved.job, run_folder(resolved), resume=resume or is_restart)
    overwrite = overwrite and not is_restart
    resolved = with_local_gpu(resolved)
    resolved = _settled_on_rank(resolved, num_ranks, resume=resume or is_restart)
    exit_code = train_rank(_rank_config(resolved, resume=resume or is_restart, overwrite=overwrite))
    if exit_code is ExitCode.DONE and os.environ["RANK"] == "0":
        _log_waterfall(run_folder(resolved))
    return exit_code


def _settled_on_rank(resolved: ResolvedJob, num_ranks: int, *, resume: bool) -> ResolvedJob:
    """Return the job with what each rank settles by itself, equally."""
    if not resolved.leaves_compile_open and resolved.job.precision.float8 == "none":
        return resolved
    from meshwright.app.job.compile_choice import settle_for_training
    from meshwright.trainer.run.run_folder import read_manifest

    manifest = read_manifest(run_folder(resolved))
    resolved = settle_for_training(resolved, num_ranks, manifest)
    return settle_float8_for_training(resolved, manifest if resume else None)


def _log_waterfall(run: Run) -> None:
    """Say where the steps of a run that is done went."""
    if progress.isEnabledFor(logging.INFO):
        for line in short_report(run):
            progress.info("%s", line)


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


def _refuse_both(*, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError("--resume continues the run folder and --overwrite replaces it: give one of them")


def _look_for_checkpoint(run: Run, *, resume: bool, required: bool) -> None:
    """Warn of, or with `required` refuse, a run that is to be resumed and has no checkpoint, such as a mistyped one."""
    if not resume or run.checkpoint_steps():
        return
    if required:
        raise ConfigError(f"--require-checkpoint: {run.folder} holds no checkpoint: name the run's folder in run.dir")
    logger.warning("--resume: %s holds no checkpoint, so this run starts at step 0", run.folder)


def _refuse_no_step(job: Job, run: Run, *, resume: bool) -> None:
    """Raise ConfigError where train.stop_after lets a resumed run do no step: exit code 75 would repeat without end."""
    done, stop_after = max(run.checkpoint_steps(), default=0), job.train.stop_after
    if resume and stop_after is not None and stop_after <= done < job.train.steps:
        raise ConfigError(
            f"train.stop_after = {stop_after}, and {run.folder} has a checkpoint after step {done}: set "
            f"train.stop_after=none, or to a step after {done}"
        )


def _refuse_open_layout(resolved: ResolvedJob) -> None:
    """Raise ConfigError for a layout that each rank would have to choose by itself, and for what needs our launcher."""
    if resolved.job.replicas.independent:
        raise ConfigError(
            "replicas.independent = true needs the launcher of `meshwright train`, which replaces lost replicas; "
            "torchrun starts all ranks as one group: start `meshwright train` without torchrun, and `meshwright join` "
            "on other machines, or set replicas.independent to false"
        )
    if resolved.job.layout.search:
        raise ConfigError(
            f"layout.search = true is settled once, before any rank starts, but torchrun started them already: "
            f"`meshwright plan {resolved.path} --write` puts the layout into the job"
        )
    if resolved.job.layout.activation_checkpoint == "auto":
        raise ConfigError(
            'layout.activation_checkpoint = "auto" is settled once, before any rank starts, but torchrun started them '
            "already: set it to none, selective or full"
        )


def settled(
    resolved: ResolvedJob, ranks: int | None, *, resume: bool, overwrite: bool
) -> tuple[ResolvedJob, int, Estimate | None]:
    """Return the job with nothing left open, the ranks to start, and the estimate of a layout that was planned."""
    from meshwright.trainer.run.run_folder import read_manifest

    searches, found = resolved.job.layout.search, None
    resumed = read_manifest(run_folder(resolved)) if resume else None
    if searches:
        from meshwright.app.job.recompute_budget import plan_layout

        raise_problems(resolved.path, check_job(resolved, None, resume=resume, overwrite=overwrite))
        resolved = settle_float8_for_training(with_local_gpu(resolved), resumed)
        found = plan_layout(resolved, ranks, resumed)
        resolved = found.resolve(resolved)
    num_ranks = num_ranks_of(resolved.job, ranks)
    on_device = _on_device(resolved) if resolved.job.layout.attention_backend in CUDA_BACKENDS else resolved
    raise_all(on_device, check_job(on_device, num_ranks, resume=resume, overwrite=overwrite), num_ranks)
    # Only now: both import torch, which takes seconds that a mistake in the job should not.
    fork_server()
    from meshwright.trainer.launch.ranks import require_devices

    require_devices(resolved.job.run, num_ranks)
    if resolved.job.layout.attention_backend != "auto":
        raise_problems(resolved.path, layout_problems_of(_on_device(resolved), num_ranks))
    resolved = with_local_gpu(resolved)
    _note_precision(resolved)
    if resolved.leaves_compile_open:
        from meshwright.app.job.compile_choice import settle_for_training

        resolved = settle_for_training(resolved, num_ranks, resumed)
    if not searches:
        resolved = settle_float8_for_training(resolved, resumed)
    if resolved.job.layout.activation_checkpoint == "auto":
        from meshwright.app.job.recompute_budget import budget_layout

        found = budget_layout(resolved, num_ranks, resumed)
        resolved = found.resolve(resolved)
    if found is None:
        return resolved, num_ranks, None
    predicted = found.estimate and f", predicted to take {format_duration(found.estimate.step.total_s)} a step"
    progress.info("layout %s%s", layout_text(found.layout), predicted or "")
    return resolved, num_ranks, found.estimate


def _on_device(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with run.device = "auto" settled, on which kernels depend; imports torch, which takes seconds."""
    from meshwright.trainer.launch.ranks import choose_device_type

    job = resolved.job
    device = choose_device_type(job.run)
    return replace(resolved, job=job.replace(run=job.run.model_copy(update={"device": device})))


def _note_precision(resolved: ResolvedJob) -> None:
    """Say that a job leaves the tensor cores of this machine's GPUs unused by the format that is the default, or that
    this machine's CPU is slow to quantize its moments.
    """
    device = local_gpu(resolved)
    if device is not None and (note := precision_note(resolved, device)) is not None:
        progress.info("note: %s", note)
    if (note := int8_note(resolved.job)) is not None:
        progress.info("note: %s", note)


def _rank_config(
    resolved: ResolvedJob, *, resume: bool, overwrite: bool = False, estimate: Estimate | None = None
) -> RankConfig:
    return RankConfig(
        job=resolved.job,
        run_dir=str(resolved.run_dir),
        module_dir=str(resolved.folder),
        resume=resume,
        overwrite=overwrite,
        estimate=estimate,
        log_level=log_level(),
    )
