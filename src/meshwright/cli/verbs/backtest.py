"""`meshwright backtest`: predicted against measured, for any file of measured runs; needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.pages.console import page_console, print_page

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.evaluation.dataset.read import MeasuredRun
    from meshwright.spec.run.backtest_scores import Backtest, Prediction

_PIPED_WIDTH = 120


@result_command
@click.argument("runs_file", metavar="RUNS.csv", type=click.Path(path_type=Path))
@click.option("--given", multiple=True, type=click.Path(path_type=Path), help="Your own runs: CSV, or a run folder.")
@click.option("--out", type=click.Path(path_type=Path), help="Write each row's prediction to this CSV file.")
@click.option("--folds", is_flag=True, help="Also fit again, each fifth of every stack's configurations left out.")
@click.option("--leave-out", is_flag=True, help="Also fit again, each stack left out, and with five of its runs given.")
def command(
    runs_file: Path, given: tuple[Path, ...], out: Path | None, folds: bool, leave_out: bool, as_json: bool
) -> None:
    """Predict every run of RUNS.csv and report the errors, source by source.

    --given calibrates the stacks of your own runs on them first (a few of each are enough); nothing else changes.
    --folds takes a minute and --leave-out five: they score how constants fitted on RUNS.csv do on what they have not
    seen. The format is in docs/planning.md. Exit code 0, whatever the errors; 2: bad input, or
    no row that can be used.
    """
    from meshwright.errors import ConfigError
    from meshwright.evaluation.backtest.predict_runs import calibrated, load_runs, predict_runs, write_predictions
    from meshwright.evaluation.backtest.score import backtest, shipped_sizes
    from meshwright.evaluation.fitting.given_runs import calibrate_given

    calibrations = calibrate_given(given)
    runs = calibrated(load_runs(runs_file), calibrations)
    predictions = predict_runs(runs)
    reports = [backtest(_title(list(calibrations)), runs, predictions, shipped_sizes(calibrations))]
    reports += _left_out(runs, predictions, folds=folds, leave_out=leave_out)
    if out is not None:
        write_predictions(out, predictions)
    if as_json:
        _print_json(reports, predictions)
    else:
        _show(reports, predictions)
    if all(prediction.unsupported_reason for prediction in predictions):
        raise ConfigError(
            f"{runs_file}: none of its {len(predictions)} rows can be used, the first because "
            f"{predictions[0].unsupported_reason}: fill in what is missing, or name another file"
        )


def _title(calibrated_stacks: list[str]) -> str:
    given = f", {', '.join(calibrated_stacks)} calibrated on the given runs" if calibrated_stacks else ""
    return f"shipped constants{given}"


def _left_out(
    runs: list[MeasuredRun], predictions: list[Prediction], *, folds: bool, leave_out: bool
) -> list[Backtest]:
    from meshwright.evaluation.backtest.left_out import by_folds, by_stack

    reports = [by_folds(runs, predictions)] if folds else []
    return [*reports, *(by_stack(runs, predictions) if leave_out else ())]


def _print_json(reports: list[Backtest], predictions: list[Prediction]) -> None:
    record = {
        "backtests": [report.to_dict() for report in reports],
        "predictions": [{**prediction.to_dict(), "error": prediction.error} for prediction in predictions],
    }
    print_json(record)


def _show(reports: list[Backtest], predictions: list[Prediction]) -> None:
    from meshwright.pages.tables.backtest_table import backtest_page, reasons_page

    pages: list[RenderableType] = []
    for report in reports:
        pages += [*([""] if pages else []), *backtest_page(report)]
    print_page(page_console(_PIPED_WIDTH), [*pages, *reasons_page(predictions)])
