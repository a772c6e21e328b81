"""`meshwright report`: where a run's step went, from the physical floor to what was measured; needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.result_command import result_command


@result_command
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Also trace and simulate the step; takes seconds to minutes.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with curves and figures.")
def command(folder: Path, simulate: bool, html: Path | None, as_json: bool) -> None:
    """Show where the steps of the run in RUN_FOLDER went: the floor that physics sets, what is expected above it cause
    by cause, and what was measured; then by component, next to the step that was profiled, if one was.

    The expectation is that of the layout that the run took, on the machine that its job names (see `meshwright
    calibrate` for this one).
    """
    from meshwright.app.report import report
    from meshwright.cli.output_files import require_page

    if html is not None:
        require_page("--html", html)
    found = report(folder, simulate=simulate)
    if html is not None:
        found.to_html(html)
    if as_json:
        click.echo(found.to_json())
    else:
        found.show()
