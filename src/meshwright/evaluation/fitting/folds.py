"""Predictions of runs that the fit has not seen: some of a stack's, all of them, all but a few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.stacks import stacks
from meshwright.cost.training_setup import Floats
from meshwright.evaluation.dataset.read import measured_run
from meshwright.evaluation.fitting.fit import Fit, fit
from meshwright.evaluation.fitting.given import fit_given
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns, is_timed

NUM_FOLDS, NUM_GIVEN = 5, 5


def fold_of_runs(runs: TimedRuns, seed: int) -> NDArray[np.int64]:
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


def log_predicted_by_folds(runs: TimedRuns, seed: int = 0) -> Floats:
    """Return the logarithm of each run's step as predicted by constants fitted on the other folds."""
    fold = fold_of_runs(runs, seed)
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
