"""`meshwright profile`: a few steps of a job, and where their time goes, from the floor to what was measured."""

from pathlib import Path

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option("--ranks", type=int, help="Local ranks to start; default: the layout's, or all GPUs.")
@click.option("--steps", type=int, default=3, show_default=True, help="Steps to profile, and as many to time without.")
@click.option("--warm-up", type=int, default=3, show_default=True, help="Steps before these.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the Chrome traces in this new folder.")
def command(
    job_file: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    steps: int,
    warm_up: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train a few steps of the job in JOB_FILE, or of a run's folder, and show where the time of a step goes: the lower
    bound (model FLOPs at the peak), each cause above it, predicted and measured, and the one key that would save most.

    Nothing is written to the job's run folder.
    """
    from meshwright.app.reports.profile import profile

    print_result(profile(job_file, *overrides, ranks=ranks, steps=steps, warm_up=warm_up, out=out), as_json)
