"""`meshwright chaos`: trains a job with and without faults on local ranks, and compares how both end."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option("--faults", type=click.Path(dir_okay=False, path_type=Path), help="TOML file of [[faults]].")
@click.option("--random", type=int, help="Draw so many faults instead.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random faults.")
@click.option("--ranks", type=int, help="Local ranks to start; default: the layout's, or all GPUs.")
@click.option("--shrink", is_flag=True, help="Look for the fewest faults that make a run fail.")
@click.option("--keep", type=click.Path(path_type=Path), help="New folder that keeps both runs.")
def command(
    job_file: str,
    overrides: tuple[str, ...],
    faults: Path | None,
    random: int | None,
    seed: int,
    ranks: int | None,
    shrink: bool,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Train JOB_FILE without and with faults on local ranks: both must end with the same parameters and samples.

    A file of faults holds [[faults]] tables with kind, rank, step and phase, such as crash, 1, 12 and backward.

    Exit code 0: survived; 2: bad input; 70: not survived.
    """
    from meshwright.app.chaos import chaos
    from meshwright.errors import ExitCode

    found = chaos(job_file, *overrides, faults=faults, random=random, seed=seed, ranks=ranks, shrink=shrink, keep=keep)
    print_result(found, as_json)
    sys.exit(ExitCode.DONE if found.holds else ExitCode.DO_NOT_RETRY)
