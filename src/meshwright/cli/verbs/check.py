"""`meshwright check`: everything that is wrong with a job, or what it would do; starts nothing and needs no torch."""

import json

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option("--ranks", type=int, help="Check the layout and the batch against this many ranks.")
@click.option("--resume", is_flag=True, help="Check as for train --resume.")
@click.option("--overwrite", is_flag=True, help="Check as for train --overwrite.")
def command(
    job_file: str, overrides: tuple[str, ...], ranks: int | None, resume: bool, overwrite: bool, as_json: bool
) -> None:
    """Report everything that is wrong with JOB_FILE, all at once, or what it would do.

    Starts no process and needs no torch. Exit code 0: the configuration is valid; 2: it is not, or the layout does not
    fit the devices of the cluster that the job names.
    """
    from meshwright.app.check import check
    from meshwright.errors import MeshwrightError

    try:
        found = check(job_file, *overrides, ranks=ranks, resume=resume, overwrite=overwrite)
    except MeshwrightError as error:
        if as_json:
            print_json({"is_valid": False, "error": str(error), "problems": [*error.listed] or [str(error)]})
        raise
    if as_json:
        print_json(json.loads(found.to_json()))
    else:
        click.echo(str(found))
    if found.misfit is not None:
        raise found.misfit
