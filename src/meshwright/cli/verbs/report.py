"""`meshwright report`: where a run's step went, from the physical floor to what was measured; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from meshwright.spec.run.run_report import RunReport

_LEAST_WIDTH = 80


@click.command()
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Also trace and simulate the step; takes seconds to minutes.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with curves and figures.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(folder: Path, simulate: bool, html: Path | None, as_json: bool) -> None:
    """Show where the steps of the run in RUN_FOLDER went: the floor that physics sets, what is expected above it cause
    by cause, and what was measured; then by component, next to the step that was profiled, if one was.

    The expectation is that of the layout that the run took, on the machine that its job names (see `meshwright
    calibrate` for this one).
    """
    from meshwright.app.report import report
    from meshwright.cli.output_files import require_file
    from meshwright.extras import import_extra
    from meshwright.pages.html.page import PURPOSE
    from meshwright.pages.html.run_html import write_run_html

    if html is not None:
        require_file("--html", html)
        import_extra("plotly", PURPOSE)
    found = report(folder, simulate=simulate)
    if html is not None:
        write_run_html(found, html)
    if as_json:
        by_component = {name: one.to_dict() for name, one in found.parts.items()}
        record = {"measured_step_s": found.measured_s, "expected": found.expected.to_dict(), "parts": by_component}
        record |= {} if found.example is None else {"rates_of": found.example}
        click.echo(json.dumps(record, indent=2))
        return
    _show(found)


def _show(found: RunReport) -> None:
    from rich.console import Console

    from meshwright.pages.tables.run_table import parts_section, run_page
    from meshwright.spec.run.run import HOW_TO_PROFILE

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    page = run_page(found)
    for part in (*page, *parts_section(dict(found.parts), found.measured_s, HOW_TO_PROFILE)):
        console.print(part)
