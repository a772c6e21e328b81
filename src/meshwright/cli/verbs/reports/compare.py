"""`meshwright compare`: two steps or two runs side by side: a prediction and a measurement, or two of either."""

from pathlib import Path

import click

from meshwright.cli.result_command import print_result, result_command

_PATH = click.Path(path_type=Path)


@result_command
@click.argument("a", metavar="A", type=_PATH)
@click.argument("b", metavar="B", type=_PATH)
@click.option("--step", type=int, help="Step of a profile; default: its last one.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with curves and tables.")
def command(a: Path, b: Path, step: int | None, html: Path | None, as_json: bool) -> None:
    """Show where step A and step B differ: by component, by operation, by rank.

    Each is the folder of a run that was profiled (run.profile_start), a folder or a .npz that `meshwright simulate
    --out` wrote, or a trace of torch.profiler (.json or .json.gz) of one rank. Two runs of which no step was profiled
    are compared by their settings, losses and throughput.
    """
    from meshwright.app.reports.compare import compare
    from meshwright.cli.output_files import require_page

    if html is not None:
        require_page("--html", html)
    found = compare(a, b, step=step)
    if html is not None:
        found.to_html(html)
    print_result(found, as_json)
