"""A prediction for every row of a file of measured runs, with the constants that are shipped and by the null model.

The null model: every run reaches the model FLOP rate that is usual for its device and precision.
What a person who knows nothing else would guess, and so the least that a prediction has to beat.
"""

import csv
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.memory.footprint import Footprint, fits, footprint
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.evaluation.dataset.read import MeasuredRun, read_runs
from meshwright.evaluation.dataset.row import RunRow
from meshwright.evaluation.fitting.given import Calibration
from meshwright.evaluation.fitting.timed_runs import TimedRuns, configs_of_runs, measured_step_s
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


Shares = Mapping[str, float]
"""Model FLOPs over the dense peak by "device precision", by precision, and by "" for all runs."""


def fit_null_model(setups: Sequence[TrainingSetup], measured_s: Sequence[float]) -> dict[str, float]:
    """Return the median share of the dense peak for each device and precision, each precision, and all."""
    found: dict[str, list[float]] = {}
    for setup, seconds in zip(setups, measured_s, strict=True):
        for key in _keys(setup):
            found.setdefault(key, []).append(_floor_s(setup) / seconds)
    return {key: round(float(np.median(shares)), 4) for key, shares in sorted(found.items())}


def null_step_s(setup: TrainingSetup, shares: Shares) -> float:
    """Return the seconds of a step at the share that is known of the setup's nearest kind."""
    return _floor_s(setup) / next(shares[key] for key in _keys(setup) if key in shares)


@lru_cache
def shipped_null_model() -> Shares:
    """Return the shares fitted on all published runs."""
    text = (files("meshwright.evaluation.backtest") / "null_model.toml").read_text(encoding="utf-8")
    return {name: float(share) for name, share in tomllib.loads(text).items()}


def null_by_fold(runs: TimedRuns, fold: Sequence[object]) -> np.ndarray:
    """Return each run's seconds by the null model fitted on the other folds."""
    setups = [run.setup for run in runs.runs if run.setup is not None]
    measured_s, seconds = np.exp(runs.log_measured_s), np.zeros(len(runs))
    folds = np.asarray(fold)
    for left_out in set(folds.tolist()):
        kept = np.flatnonzero(folds != left_out)
        shares = fit_null_model([setups[row] for row in kept], measured_s[kept].tolist())
        for row in np.flatnonzero(folds == left_out):
            seconds[row] = null_step_s(setups[row], shares)
    return seconds


def _keys(setup: TrainingSetup) -> tuple[str, str, str]:
    """Return what the setup may be known by, most special first."""
    precision = setup.workload.precision
    return f"{setup.cluster.device.name} {precision}", precision, ""


def _floor_s(setup: TrainingSetup) -> float:
    """Return the seconds of a step's model FLOPs at the dense peak of all devices."""
    workload = setup.workload
    flops = setup.trained_model.flops_per_token(workload.seq_len) * workload.global_batch_tokens
    return float(flops / (peaks_of((setup,)).dense[0] * setup.cluster.num_devices))
