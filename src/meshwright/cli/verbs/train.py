"""`meshwright train`: checks the job and starts its ranks; under torchrun each process trains as one of them."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option("--ranks", type=int, help="Local ranks to start; default: the layout's, or all GPUs.")
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
    as_json: bool,
) -> None:
    """Train the model that JOB_FILE describes; with layout.search = true, in the layout that `meshwright plan` picks.

    With --resume, JOB_FILE may be a run folder.

    Exit code 0: done; 2: bad input; 70: do not retry; 75: retry with --resume; 130: interrupted.
    """
    from meshwright.app.job.jobs import job_here
    from meshwright.app.train import train, train_under_torchrun
    from meshwright.trainer.launch.rank import preempt_on_sigterm

    preempt_on_sigterm()
    resolved = job_here(job_file, overrides, ranks)
    resume = resume or require_checkpoint
    with _stdout_on_stderr() if as_json else contextlib.nullcontext():
        if "RANK" in os.environ:
            code = train_under_torchrun(resolved, ranks, resume=resume, overwrite=overwrite)
        else:
            code = train(
                resolved, ranks=ranks, resume=resume, overwrite=overwrite, require_checkpoint=require_checkpoint
            ).exit_code
    if as_json and os.environ.get("RANK", "0") == "0":
        from meshwright.app.results.run_result import TrainedRun

        print_json(json.loads(TrainedRun(resolved.run_dir, code).to_json()))
    sys.exit(code)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what this process and those that it starts print to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
