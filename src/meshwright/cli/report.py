"""`meshwright report`: where a run's step went, from the physical floor to what was measured; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from meshwright.planner.measured.read import MeasuredRun
    from meshwright.spec.plan import Candidate


_LEAST_WIDTH = 100


@click.command()
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(folder: Path, as_json: bool) -> None:
    """Show where the steps of the run in RUN_FOLDER went: the floor that physics sets, what is expected above it cause
    by cause, and what was measured.

    The expectation is that of the layout that the run took, on the machine that its job names (see `meshwright
    calibrate` for this one).
    """
    from meshwright.planner.own_run import read_own_run

    run = read_own_run(folder)
    expected = _expected(run)
    measured_s = run.row.measured_s
    assert measured_s is not None
    if as_json:
        record = {"measured_step_s": measured_s, "expected": expected.to_dict()}
        click.echo(json.dumps(record, indent=2))
        return
    _show(folder, expected, measured_s)


def _expected(run: MeasuredRun) -> Candidate:
    """Return the layout that the run took with its estimate."""
    from meshwright.planner.answer import judge
    from meshwright.planner.own_run import question_of_run

    assert run.layout is not None
    return judge(run.layout, question_of_run(run))


def _show(folder: Path, expected: Candidate, measured_s: float) -> None:
    from rich.console import Console

    from meshwright.report.run_table import run_page

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for part in run_page(str(folder), expected, measured_s):
        console.print(part)
