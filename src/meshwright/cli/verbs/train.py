"""`meshwright train`: checks the job, starts its ranks, trains; under torchrun each rank runs this itself."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from meshwright.config.load import ResolvedJob
    from meshwright.trainer.launch.planned import Planned


@click.command()
@click.argument("job_file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--ranks", type=click.IntRange(min=1), help="Local ranks to start; default: the layout's, or all GPUs.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint of the run folder, if there is one.")
@click.option("--overwrite", is_flag=True, help="Rename an existing run folder out of the way and start again.")
@click.option(
    "--require-checkpoint", is_flag=True, help="With --resume: end with an error where there is no checkpoint."
)
@click.option("--planned", type=click.Path(dir_okay=False), hidden=True, help="What the launcher planned.")
def command(
    job_file: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    resume: bool,
    overwrite: bool,
    require_checkpoint: bool,
    planned: str | None,
) -> None:
    """Train the model that JOB_FILE describes; with layout.search = true, in the layout that `meshwright plan` picks.

    Exit code 0: done; 2: bad input; 70: do not retry; 75: retry with --resume; 130: interrupted.
    """
    signal.signal(signal.SIGTERM, _stop_before_training)
    if "RANK" in os.environ:
        _train_as_rank(job_file, overrides, ranks, resume=resume, overwrite=overwrite, planned=planned)
    from meshwright.app.train import train

    resume = resume or require_checkpoint
    found = train(
        job_file,
        *overrides,
        ranks=ranks,
        resume=resume,
        overwrite=overwrite,
        require_checkpoint=require_checkpoint,
        tell=click.echo,
    )
    sys.exit(found.exit_code)


def _train_as_rank(
    job_file: str, overrides: tuple[str, ...], ranks: int | None, *, resume: bool, overwrite: bool, planned: str | None
) -> NoReturn:
    from meshwright.app.job_problems import layout_problems_of, run_folder
    from meshwright.config.load import load_job, raise_problems
    from meshwright.errors import ConfigError
    from meshwright.spec.machine.allocator_settings import set_allocator

    if resume and overwrite:
        raise ConfigError("--resume continues the run folder and --overwrite replaces it: give one of them")
    resolved = load_job(job_file, overrides)
    run = run_folder(resolved)
    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(resolved.folder))
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"the environment has RANK={os.environ['RANK']} but no WORLD_SIZE, so this is no rank that torchrun "
            "started: unset RANK, or start the ranks with torchrun"
        )
    started = int(os.environ["WORLD_SIZE"])
    plan = _read_plan(resolved, planned)
    if plan is not None:
        resolved = replace(resolved, job=plan.job(resolved.job))
    if ranks is not None and ranks != started:
        raise ConfigError(f"--ranks {ranks}, but torchrun started {started} ranks already: leave --ranks out")
    # Before torch, and before any rank waits for another: torchrun starts ranks without a check.
    raise_problems(resolved.path, layout_problems_of(resolved, started))
    # Before torch is imported, which may read its settings then.
    set_allocator(os.environ)
    from meshwright.trainer.launch.worker import train_as_rank

    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    # The folder that a restart finds is the run's own.
    overwrite = overwrite and not is_restart
    estimate = None if plan is None else plan.estimate
    resume = resume or is_restart
    sys.exit(train_as_rank(resolved.job, run, resume=resume, overwrite=overwrite, estimate=estimate))


def _read_plan(resolved: ResolvedJob, planned: str | None) -> Planned | None:
    """Return what the launcher planned, None for a job that sets its layout; raises ConfigError without a launcher."""
    from meshwright.errors import ConfigError
    from meshwright.trainer.launch.planned import Planned

    if planned is not None:
        return Planned.from_json(Path(planned).read_text(encoding="utf-8"))
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
    return None


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    from meshwright.errors import Preempted

    raise Preempted("SIGTERM before training began: nothing was changed")
