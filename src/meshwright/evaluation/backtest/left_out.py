"""Backtests whose constants are fitted again, so that no run is predicted by constants it had a part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.cost.arrays import Floats
from meshwright.cost.constants import all_constants
from meshwright.errors import ConfigError
from meshwright.evaluation.backtest.null_model import null_by_fold
from meshwright.evaluation.backtest.score import Sizes, backtest
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.folds import (
    NUM_FOLDS,
    NUM_GIVEN,
    fits_without_stacks,
    fold_of_runs,
    half_widths_by_fold,
    half_widths_by_stack,
    log_predicted_by_folds,
    log_predicted_unknown,
    log_predicted_unseen,
    predicted_after_given,
)
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns, is_timed
from meshwright.spec.run.backtest_scores import Backtest, Prediction

_FEWEST_RUNS = 20


def by_folds(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction], seed: int = 0) -> Backtest:
    """Return the scores where the stack is known: each fifth of its configurations is predicted from the others."""
    timed = _timed(runs)
    fold = fold_of_runs(timed, seed)
    log_s = log_predicted_by_folds(timed, seed)
    widths = half_widths_by_fold(_off(timed, log_s), timed.stack, fold)
    replaced = _replaced(predictions, timed, log_s, widths, null_by_fold(timed, fold.tolist()))
    kept = len(timed) * (NUM_FOLDS - 1) // NUM_FOLDS
    title = f"stack known: {NUM_FOLDS} folds by configuration within each stack"
    return backtest(title, runs, replaced, fitted_sizes(len(timed.stacks), kept))


def by_stack(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction], num_draws: int = 5) -> Iterator[Backtest]:
    """Yield the scores where the stack is unseen, where also what it does is unknown, and where five of its runs are
    given, for each of several draws.
    """
    timed = _timed(runs)
    fits = fits_without_stacks(timed)
    null_s = null_by_fold(timed, timed.stack.tolist())
    sizes = fitted_sizes(0, len(timed) - len(timed) // len(timed.stacks))
    titles = ("stack unseen: generic constants", "stack unseen, and unknown what it does")
    for title, predict in zip(titles, (log_predicted_unseen, log_predicted_unknown), strict=True):
        log_s = predict(timed, fits)
        widths = half_widths_by_stack(_off(timed, log_s), timed.stack)
        yield backtest(title, runs, _replaced(predictions, timed, log_s, widths, null_s), sizes)
    for seed in range(num_draws):
        log_s, widths = predicted_after_given(timed, fits, seed)
        title = f"stack met in {NUM_GIVEN} runs, the others predicted (draw {seed + 1} of {num_draws})"
        replaced = _replaced(predictions, timed, log_s, widths, null_s)
        yield backtest(title, runs, replaced, fitted_sizes(1, sizes.num_fitted_runs + NUM_GIVEN))


def fitted_sizes(num_stacks: int, num_runs: int) -> Sizes:
    """Return how much a fit of all constants and of `num_stacks` stacks fits."""
    num_free = sum(constant.spread > 0 for constant in all_constants().values())
    num_of_stacks = len(MULTIPLIERS) * num_stacks
    return Sizes(num_free + num_of_stacks, num_of_stacks, num_runs)


def _timed(runs: Sequence[MeasuredRun]) -> TimedRuns:
    timed = TimedRuns([run for run in runs if is_timed(run)])
    if len(timed) < _FEWEST_RUNS or len(timed.stacks) < 2:
        raise ConfigError(
            f"constants cannot be fitted on {len(timed)} timed runs of {len(timed.stacks)} stacks: leave out --folds "
            f"and --leave-out, or give a file of at least {_FEWEST_RUNS} runs of two stacks"
        )
    return timed


def _off(runs: TimedRuns, log_predicted_s: Floats) -> Floats:
    """Return |measured / predicted - 1|."""
    return np.abs(np.expm1(runs.log_measured_s - log_predicted_s))


def _replaced(
    predictions: Sequence[Prediction], timed: TimedRuns, log_s: Floats, widths: Floats, null_s: Floats
) -> list[Prediction]:
    """Return the predictions with other times; runs that were given (NaN) are not compared."""
    position = {run.row.id: index for index, run in enumerate(timed.runs)}
    replaced = []
    for prediction in predictions:
        index = position.get(prediction.id)
        if index is None or np.isnan(log_s[index]):
            replaced.append(prediction.replace(measured_step_time_s=None))
            continue
        times = {
            "predicted_step_time_s": float(np.exp(log_s[index])),
            "relative_error": float(widths[index]),
            "null_step_time_s": float(null_s[index]),
        }
        replaced.append(prediction.replace(**times))
    return replaced
