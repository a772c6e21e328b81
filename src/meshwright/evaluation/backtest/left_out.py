"""Backtests whose constants are fitted again, so that no run is predicted by constants it had a part in.

Predictions of runs that the fit has not seen: some of a stack's, all of them, all but a few; and their intervals.
An interval must hold 80 % of such runs: the 80th percentile of left-out errors of the stack itself. A stack of few runs
says little of its own tails: the errors of all stacks count as much as eight runs more.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.constants import all_constants
from meshwright.cost.layout_table import Floats, Ints
from meshwright.cost.stack_factors import stacks
from meshwright.errors import ConfigError
from meshwright.evaluation.backtest.predict_runs import null_by_fold
from meshwright.evaluation.backtest.score import Sizes, backtest
from meshwright.evaluation.dataset.read import MeasuredRun, measured_run
from meshwright.evaluation.fitting.fit import Fit, fit
from meshwright.evaluation.fitting.given import fit_given
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns, is_timed
from meshwright.spec.run.backtest_scores import Backtest, Prediction

_FEWEST_RUNS = 20


def by_folds(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]) -> Backtest:
    """Return the scores where the stack is known: each fifth of its configurations is predicted from the others."""
    timed = _timed(runs)
    fold = fold_of_runs(timed)
    log_s = log_predicted_by_folds(timed)
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


NUM_FOLDS, NUM_GIVEN = 5, 5


def fold_of_runs(runs: TimedRuns, seed: int = 0) -> Ints:
    """Return each run's fold: within a stack, all runs of one configuration share theirs."""
    chance = np.random.default_rng(seed)
    fold = np.zeros(len(runs), np.int64)
    for stack in runs.stacks:
        rows = np.flatnonzero(runs.stack == stack)
        groups = sorted(set(runs.group[rows]))
        # Stacks of fewer configurations than folds begin at any fold, so that folds have equally many runs.
        folds = (chance.permutation(len(groups)) + chance.integers(NUM_FOLDS)) % NUM_FOLDS
        fold[rows] = folds[np.searchsorted(groups, runs.group[rows])]
    return fold


def log_predicted_by_folds(runs: TimedRuns) -> Floats:
    """Return the logarithm of each run's step as predicted by constants fitted on the other folds."""
    fold = fold_of_runs(runs)
    predicted = np.zeros(len(runs))
    for left_out in range(NUM_FOLDS):
        rows = fold == left_out
        if rows.any() and not rows.all():
            predicted[rows] = fit(runs, ~rows).log_predicted_s(runs)[rows]
    return predicted


def fits_without_stacks(runs: TimedRuns) -> dict[str, Fit]:
    """Return, for each stack, what is fitted on the runs of all others; its own multipliers are 1."""
    return {stack: fit(runs, runs.stack != stack) for stack in runs.stacks}


def log_predicted_unseen(runs: TimedRuns, fits: dict[str, Fit]) -> Floats:
    """Return the logarithm of each run's step as predicted by constants that its stack had no part in."""
    predicted = np.zeros(len(runs))
    for stack, without in fits.items():
        rows = runs.stack == stack
        predicted[rows] = without.log_predicted_s(runs)[rows]
    return predicted


def log_predicted_unknown(runs: TimedRuns, fits: dict[str, Fit]) -> Floats:
    """Return the same where not even what the stack does is known, beyond what its runs' rows and its relatives state.

    NaN for runs that then cannot be priced.
    """
    predicted = np.full(len(runs), np.nan)
    for stack, without in fits.items():
        known = {name: facts for name, facts in stacks().items() if name != stack}
        rows = np.flatnonzero(runs.stack == stack)
        read_again = [measured_run(dict(runs.runs[row].row.cells), known) for row in rows]
        is_priced = np.array([is_timed(run) for run in read_again])
        timed = TimedRuns([run for run in read_again if is_timed(run)])
        predicted[rows[is_priced]] = Fit(without.constants).log_predicted_s(timed)
    return predicted


def predicted_after_given(runs: TimedRuns, fits: dict[str, Fit], seed: int = 0) -> tuple[Floats, Floats]:
    """Return the logarithm of each run's step, and the half width of its interval, once five others of its stack are
    known; NaN for those that are given, and for stacks that have no more.
    """
    predicted, width = np.full(len(runs), np.nan), np.full(len(runs), np.nan)
    chance = np.random.default_rng(seed)
    for stack, without in fits.items():
        rows = np.flatnonzero(runs.stack == stack)
        if len(rows) <= NUM_GIVEN:
            continue
        given = chance.permutation(rows)[:NUM_GIVEN]
        logarithms, half_width = fit_given(runs.take(given), without.constants, np.zeros(len(MULTIPLIERS)))
        left = np.setdiff1d(rows, given)
        others = runs.take(left)
        predicted[left] = others.log_predicted_s(without.constants, np.repeat(logarithms[:, None], len(left), axis=1))
        width[left] = half_width
    return predicted, width


SHARE = 0.8
_OTHERS_WEIGHT = 8.0


def interval_half_width(own: Floats, everyone: Floats) -> float:
    """Return the half width as a share of the predicted step, from |measured / predicted - 1| of left-out runs."""
    errors = np.concatenate([own, everyone])
    weights = np.concatenate([np.ones(len(own)), np.full(len(everyone), _OTHERS_WEIGHT / max(1, len(everyone)))])
    order = np.argsort(errors)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(errors[order][np.searchsorted(reached, SHARE)])


def half_widths_by_fold(errors: Floats, stack: NDArray[np.str_], fold: Ints) -> Floats:
    """Return each run's half width, from the errors of its stack in the other folds."""
    widths = np.zeros(len(errors))
    for left_out in np.unique(fold):
        kept = fold != left_out
        for name in np.unique(stack[~kept]):
            rows = ~kept & (stack == name)
            widths[rows] = interval_half_width(errors[kept & (stack == name)], errors[kept])
    return widths


def half_widths_by_stack(errors: Floats, stack: NDArray[np.str_]) -> Floats:
    """Return each run's half width, from the errors of all other stacks."""
    widths = np.zeros(len(errors))
    for name in np.unique(stack):
        widths[stack == name] = unseen_half_width(errors[stack != name])
    return widths


def unseen_half_width(errors: Floats) -> float:
    """Return the half width for an unknown stack, from errors of stacks that the fit had not seen."""
    return interval_half_width(np.zeros(0), errors[~np.isnan(errors)])
