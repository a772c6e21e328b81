"""`meshwright report`: where a run's step went, from the physical floor to what was measured; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from meshwright.planner.measured.read import MeasuredRun
    from meshwright.spec.plan import Candidate
    from meshwright.spec.step_parts import StepParts
    from meshwright.spec.timeline import Timeline


_LEAST_WIDTH = 100


@click.command()
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Also run the step dry (see simulate); takes seconds to minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(folder: Path, simulate: bool, as_json: bool) -> None:
    """Show where the steps of the run in RUN_FOLDER went: the floor that physics sets, what is expected above it cause
    by cause, and what was measured; then by component, next to the step that was profiled, if one was.

    The expectation is that of the layout that the run took, on the machine that its job names (see `meshwright
    calibrate` for this one).
    """
    from meshwright.planner.own_run import read_own_run

    run = read_own_run(folder)
    expected = _expected(run)
    measured_s = run.row.measured_s
    assert measured_s is not None
    parts = _parts(folder, run, expected, simulate=simulate)
    if as_json:
        by_component = {name: one.to_dict() for name, one in parts.items()}
        record = {"measured_step_s": measured_s, "expected": expected.to_dict(), "parts": by_component}
        click.echo(json.dumps(record, indent=2))
        return
    _show(folder, expected, measured_s, parts)


def _parts(folder: Path, run: MeasuredRun, expected: Candidate, *, simulate: bool) -> dict[str, StepParts]:
    """Return the step by component: as the formulas expect it, as it is simulated if asked for, as it was profiled."""
    from meshwright.report.run_table import MEASURED
    from meshwright.spec.expected_parts import expected_parts
    from meshwright.spec.run import Run
    from meshwright.spec.step_parts import step_parts

    parts = {"expected": expected_parts(expected.estimate.step)}
    if simulate:
        parts["simulated"] = step_parts(_simulated(folder, run))
    # Reading a profile takes torch, which whoever only reads a run may not have.
    if any(Run(folder).timelines.glob("*.json.gz")):
        from meshwright.profiler.run_profile import profile_of_run

        parts[MEASURED] = step_parts(profile_of_run(folder))
    return parts


def _simulated(folder: Path, run: MeasuredRun) -> Timeline:
    """Return the run's step, traced again and played on the machine that the job names."""
    from meshwright.simulator.simulate import simulate
    from meshwright.spec.run import Run
    from meshwright.tracer.dry_run import trace_job
    from meshwright.tracer.trace import device_type_of

    assert run.layout is not None
    assert run.setting is not None
    # What was left open when the run began has been settled.
    keys = {name: value for name, value in run.layout.model_dump().items() if value is not None} | {"search": False}
    overrides = [f"layout.{name}={json.dumps(value)}" for name, value in keys.items()]
    cluster = run.setting.cluster
    device = device_type_of(cluster.device)
    traces = trace_job(str(Run(folder).job), overrides, run.layout.num_ranks, device=device)
    return simulate(traces, cluster, str(folder))


def _expected(run: MeasuredRun) -> Candidate:
    """Return the layout that the run took with its estimate."""
    from meshwright.planner.answer import judge
    from meshwright.planner.own_run import question_of_run

    assert run.layout is not None
    return judge(run.layout, question_of_run(run))


def _show(folder: Path, expected: Candidate, measured_s: float, parts: dict[str, StepParts]) -> None:
    from rich.console import Console

    from meshwright.report.run_table import parts_section, run_page
    from meshwright.spec.run import HOW_TO_PROFILE

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for part in (*run_page(str(folder), expected, measured_s), *parts_section(parts, measured_s, HOW_TO_PROFILE)):
        console.print(part)
