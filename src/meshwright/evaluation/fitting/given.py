"""calibrate: a stack's three multipliers from a few runs of a user's own; everything else is fixed.

A few runs may be unlike the others that their stack will make. How far to trust them follows from themselves:
the noise of the fit is how far they are from being off alike, as if two more runs had been 30 % from that. How wide the
interval is, too: each is predicted from the others, and the mean of those errors is taken for that of a Laplace
distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.constants import Constants, fitted_constants
from meshwright.cost.layout_table import Floats
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.fit import HIGHEST, LOWEST, SPREADS, Regression, Unknowns, minimise
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns
from meshwright.spec.step.stack import Stack

_LAPLACE_80 = math.log(5)
"""Half width that holds 80 % of a Laplace distribution, over its mean absolute value."""
_NOISE, _NOISE_WEIGHT = 0.3, 2.0
"""Spread of residuals before any run is known, and the runs that this counts as much as."""
_ERROR, _ERROR_WEIGHT = 0.09, 5.0
"""Mean absolute error of stacks that five runs calibrate, and the runs that this counts as much as."""
_NUDGE = 1e-4


@dataclass(frozen=True)
class Calibration:
    """What follows from given runs about their stack."""

    stack: str
    """Name in the runs' `stack` column."""
    multipliers: tuple[float, float, float]
    """Compute, communication, overhead."""
    num_runs: int
    relative_error: float
    """Half width of the interval that holds 80 % of such runs."""

    def applied(self, stack: Stack) -> Stack:
        """Return `stack` with these constants."""
        fitted = dict(zip(MULTIPLIERS, self.multipliers, strict=True))
        return stack.replace(name=self.stack, num_runs=self.num_runs, relative_error=self.relative_error, **fitted)


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Return the calibration by the timed runs of one stack, starting from its own multipliers, 1 if unknown."""
    timed = TimedRuns(runs)
    assert len(timed.stacks) == 1, f"runs of {len(timed.stacks)} stacks"
    setup = runs[0].setup
    assert setup is not None, "a run that cannot be priced"
    start = np.log([getattr(setup.stack, name) for name in MULTIPLIERS])
    logarithms, half_width = fit_given(timed, fitted_constants(), start)
    compute, communication, overhead = np.exp(logarithms).tolist()
    return Calibration(timed.stacks[0], (compute, communication, overhead), len(timed), half_width)


def fit_given(runs: TimedRuns, constants: Constants, start: Floats) -> tuple[Floats, float]:
    """Return the logarithms [3] of the multipliers of the one stack of `runs`, near `start`, and the half width of its
    80 % interval as a share of the step.
    """
    regression = _linear_regression(runs, constants, start, start)
    regression = _linear_regression(runs, constants, start, _solve(regression))
    errors = []
    for row in range(len(runs)):
        weights = np.ones(len(runs))
        weights[row] = 0
        predicted = regression.predict(_solve(replace(regression, weights=weights)))
        errors.append(abs(math.expm1(runs.log_measured_s[row] - predicted[row])))
    mean = (sum(errors) + _ERROR_WEIGHT * _ERROR) / (len(errors) + _ERROR_WEIGHT)
    return _solve(regression), _LAPLACE_80 * mean


def _linear_regression(runs: TimedRuns, constants: Constants, start: Floats, around: Floats) -> Regression:
    """Return the fit of the multipliers, with predictions linear around `around`: many fits then price nothing."""

    def priced(logarithms: Floats) -> Floats:
        return runs.log_predicted_s(constants, np.repeat(logarithms[:, None], len(runs), axis=1))

    predicted = priced(around)
    nudges = np.eye(len(MULTIPLIERS)) * _NUDGE
    slopes = np.stack([(priced(around + nudge) - predicted) / _NUDGE for nudge in nudges], axis=1)
    return Regression(
        predict=lambda logarithms: predicted + slopes @ (logarithms - around),
        slopes=lambda logarithms, predicted: slopes,
        measured=runs.log_measured_s,
        weights=np.ones(len(runs)),
        unknowns=Unknowns(start, np.array(SPREADS), np.log(LOWEST), np.log(HIGHEST)),
    )


def _solve(regression: Regression) -> Floats:
    """Return the multipliers that the used runs suggest, which are trusted to the extent that they agree."""
    unknowns, used = regression.unknowns, regression.weights > 0
    off = (regression.measured - regression.predict(unknowns.prior))[used]
    apart = np.abs(off - np.median(off)).sum() if used.any() else 0.0
    noise = float((apart + _NOISE_WEIGHT * _NOISE) / (used.sum() + _NOISE_WEIGHT))
    return minimise(replace(regression, noise=noise))
