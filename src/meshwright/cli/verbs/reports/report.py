"""`meshwright report`: where a run's step went, from the physical floor to what was measured; needs no torch."""

from pathlib import Path

import click

from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Also trace and simulate the step; takes seconds to minutes.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with curves and figures.")
def command(folder: Path, simulate: bool, html: Path | None, as_json: bool) -> None:
    """Show where the step time of the run in RUN_FOLDER went: the lower bound (model FLOPs at the peak), the predicted
    causes above it, and the measured step; then by component, next to the profiled step, if there is one.

    The prediction is for the run's layout on the machine that its job names (`meshwright calibrate` measures this
    one). Of a run without a finished step: where its time went.
    """
    from meshwright.app.reports.report import goodput_only, report
    from meshwright.cli.output_files import require_page

    if html is not None:
        require_page("--html", html)
    # A figure or a prediction of steps needs one.
    if html is None and not simulate and (stepless := goodput_only(folder)) is not None:
        print_result(stepless, as_json)
        return
    found = report(folder, simulate=simulate)
    if html is not None:
        found.to_html(html)
    print_result(found, as_json)
