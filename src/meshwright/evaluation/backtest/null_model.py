"""The null model: every run reaches the model FLOP rate that is usual for its device and precision.

What a person who knows nothing else would guess, and so the least that a prediction has to beat.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files

import numpy as np

from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.training_setup import TrainingSetup
from meshwright.evaluation.fitting.timed_runs import TimedRuns

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
    flops = setup.model.flops_per_token(workload.seq_len) * workload.global_batch_tokens
    return float(flops / (peaks_of((setup,)).dense[0] * setup.cluster.num_devices))
