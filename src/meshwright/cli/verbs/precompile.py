"""`meshwright precompile`: compiles a job's blocks ahead of training, into a folder that its ranks read."""

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option("--ranks", type=int, help="Local ranks to start; default: the layout's, or all GPUs.")
def command(job_file: str, overrides: tuple[str, ...], ranks: int | None, as_json: bool) -> None:
    """Compile the blocks of the job in JOB_FILE and save the code to layout.compile_cache, or to its run folder.

    `meshwright train` reads it before its ranks compile. It holds for the same job, layout, torch, device and code.
    """
    from meshwright.app.precompile import precompile

    print_result(precompile(job_file, *overrides, ranks=ranks), as_json)
