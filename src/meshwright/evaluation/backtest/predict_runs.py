"""predict_runs: a prediction for every row of a file of measured runs, with the constants that are shipped."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.memory.footprint import Footprint, fits, footprint
from meshwright.cost.step_times import step_times
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.evaluation.backtest.null_model import null_step_s, shipped_null_model
from meshwright.evaluation.dataset.read import MeasuredRun, read_runs
from meshwright.evaluation.dataset.row import RunRow
from meshwright.evaluation.fitting.given import Calibration
from meshwright.evaluation.fitting.timed_runs import configs_of_runs, measured_step_s
from meshwright.spec.run.backtest_scores import Prediction

COLUMNS = (
    "id",
    "predicted_step_time_s",
    "predicted_peak_bytes",
    "fits",
    "stack",
    "assumed",
    "error_pct",
    "unsupported_reason",
)
"""Of the file that `write_predictions` makes."""


def load_runs(file: Path) -> list[MeasuredRun]:
    """Return the rows of the CSV `file`; raises ConfigError where it is no file of runs with names of their own."""
    runs = read_runs(file)
    if not runs:
        raise ConfigError(f"{file} has a header and no row: add a measured run a row")
    counts = Counter(run.row.id for run in runs)
    twice = [name for name, count in counts.items() if count > 1]
    if "" in counts:
        raise ConfigError(f"{file} has {counts['']} rows whose id is empty: give each a name of its own")
    if twice:
        names = ", ".join(twice[:5]) + (", ..." if len(twice) > 5 else "")
        raise ConfigError(f"{file} has several rows of one id ({names}): give each a name of its own")
    return [_checked(run) for run in runs]


def calibrated(runs: Sequence[MeasuredRun], calibrations: Mapping[str, Calibration]) -> list[MeasuredRun]:
    """Return the runs, those of calibrated stacks with the constants that were found."""
    return [_calibrated(run, calibrations.get(run.row.stack)) for run in runs]


def predict_runs(runs: Sequence[MeasuredRun]) -> list[Prediction]:
    """Return a prediction for each run, in order; one that cannot be priced carries the reason."""
    priced = [run for run in runs if run.is_supported]
    found = dict(zip((run.row.id for run in priced), _price(priced), strict=True)) if priced else {}
    return [_prediction(run, found.get(run.row.id)) for run in runs]


def write_predictions(file: Path, predictions: Sequence[Prediction]) -> None:
    """Write the predictions as CSV; raises ConfigError where `file` cannot be written."""
    try:
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(_cells(prediction) for prediction in predictions)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): name another file") from None


@dataclass(frozen=True)
class _Price:
    step_s: float
    peak_bytes: float
    fits: bool


def _checked(run: MeasuredRun) -> MeasuredRun:
    """Return the run, with the reason if its device lacks a figure that pricing needs."""
    if run.setup is None:
        return run
    try:
        peaks_of((run.setup,))
    except UnsupportedError as error:
        return replace(run, setup=None, layout=None, unsupported_reason=str(error))
    return run


def _calibrated(run: MeasuredRun, calibration: Calibration | None) -> MeasuredRun:
    if run.setup is None or calibration is None:
        return run
    return replace(run, setup=replace(run.setup, stack=calibration.applied(run.setup.stack)))


def _price(runs: Sequence[MeasuredRun]) -> list[_Price]:
    configs = configs_of_runs(runs)
    memory = footprint(configs)
    columns = zip(step_times(configs).total_s, fits(memory, configs), strict=True)
    return [
        _Price(float(step_s), _peak_bytes(memory, row, runs[row].row), bool(fit))
        for row, (step_s, fit) in enumerate(columns)
    ]


def _peak_bytes(memory: Footprint, index: int, row: RunRow) -> float:
    kinds = {"allocated": memory.allocated_bytes, "smi": memory.smi_bytes}
    return float(kinds.get(row.text("mem_kind"), memory.reserved_bytes)[index])


def _prediction(run: MeasuredRun, price: _Price | None) -> Prediction:
    reason, measured_s, measured_bytes = run.unsupported_reason, None, None
    try:
        measured_s, measured_bytes = measured_step_s(run.row), run.row.measured_bytes
    except MeshwrightError as error:
        reason = reason or f"not compared: {error}"
    if price is not None and not (math.isfinite(price.step_s) and price.step_s > 0 and math.isfinite(price.peak_bytes)):
        price, reason = None, "its sizes are beyond what can be priced"
    if price is None or run.setup is None:
        return Prediction(
            id=run.row.id,
            source=run.row.source,
            stack=run.row.stack,
            assumed=run.assumed,
            unsupported_reason=reason,
        )
    return Prediction(
        id=run.row.id,
        source=run.row.source,
        stack=run.setup.stack.name,
        predicted_step_time_s=price.step_s,
        relative_error=run.setup.stack.relative_error,
        predicted_peak_bytes=price.peak_bytes,
        fits=price.fits,
        assumed=run.assumed,
        measured_step_time_s=measured_s,
        measured_peak_bytes=measured_bytes if measured_bytes else None,
        memory_kind=run.row.text("mem_kind"),
        null_step_time_s=null_step_s(run.setup, shipped_null_model()),
        unsupported_reason=reason,
    )


def _cells(prediction: Prediction) -> tuple[str, ...]:
    def text(value: float | None, digits: str) -> str:
        return "" if value is None else format(value, digits)

    error = prediction.error
    return (
        prediction.id,
        text(prediction.predicted_step_time_s, ".6g"),
        text(prediction.predicted_peak_bytes, ".0f"),
        "" if prediction.fits is None else str(prediction.fits).lower(),
        prediction.stack,
        "; ".join(prediction.assumed),
        text(None if error is None else 100 * error, ".2f"),
        prediction.unsupported_reason,
    )
