"""`meshwright train`: checks the job and starts its ranks; under torchrun each process trains as one of them."""

from __future__ import annotations

import os
import sys

import click


@click.command()
@click.argument("job_file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--ranks", type=click.IntRange(min=1), help="Local ranks to start; default: the layout's, or all GPUs.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint of the run folder, if there is one.")
@click.option("--overwrite", is_flag=True, help="Rename an existing run folder out of the way and start again.")
@click.option(
    "--require-checkpoint", is_flag=True, help="With --resume: end with an error where there is no checkpoint."
)
def command(
    job_file: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    resume: bool,
    overwrite: bool,
    require_checkpoint: bool,
) -> None:
    """Train the model that JOB_FILE describes; with layout.search = true, in the layout that `meshwright plan` picks.

    Exit code 0: done; 2: bad input; 70: do not retry; 75: retry with --resume; 130: interrupted.
    """
    from meshwright.app.train import train, train_under_torchrun
    from meshwright.trainer.launch.rank import preempt_on_sigterm

    preempt_on_sigterm()
    if "RANK" in os.environ:
        sys.exit(train_under_torchrun(job_file, overrides, ranks, resume=resume, overwrite=overwrite))
    sys.exit(
        train(
            job_file,
            *overrides,
            ranks=ranks,
            resume=resume,
            overwrite=overwrite,
            require_checkpoint=require_checkpoint,
        )
    )
