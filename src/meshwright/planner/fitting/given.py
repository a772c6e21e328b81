"""calibrate: a stack's three multipliers from a few runs that somebody has made with it; everything else is fixed.

Few runs cannot tell the three apart, so that priors are narrower than those of the fit of all constants, and a residual
of 10 % costs what one of 5 % does there. How wide the interval is, the given runs tell themselves: each is predicted
from the others, and the mean of those errors is that of a distribution with tails like Laplace's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.case import Floats
from meshwright.cost.constants import Constants, fitted_constants
from meshwright.planner.fitting.fit import HIGHEST, LOWEST
from meshwright.planner.fitting.robust import Problem, Unknowns, minimise
from meshwright.planner.fitting.timed_runs import MULTIPLIERS, TimedRuns
from meshwright.planner.measured.read import MeasuredRun
from meshwright.spec.stack import Stack

_SPREADS = (0.1, 0.2, 0.2)
_NOISE = 0.1
_LAPLACE_80 = math.log(5)
"""Half width that holds 80 % of a Laplace distribution, over its mean absolute value."""
USUAL_ERROR, _USUAL_WEIGHT = 0.07, 3.0
"""Mean absolute error of stacks that are calibrated by five runs, and the runs that this counts as much as."""
_NUDGE = 1e-4


@dataclass(frozen=True)
class Calibration:
    """What given runs tell of their stack."""

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
    """Return what the timed runs of one stack tell of it, starting from its own multipliers, which are 1 if unknown."""
    timed = TimedRuns(runs)
    assert len(timed.stacks) == 1, f"runs of {len(timed.stacks)} stacks"
    setting = runs[0].setting
    assert setting is not None, "a run that cannot be priced"
    start = tuple(math.log(getattr(setting.stack, name)) for name in MULTIPLIERS)
    constants = fitted_constants()
    everything = np.ones(len(timed), bool)
    return Calibration(
        stack=timed.stacks[0],
        multipliers=as_multipliers(fit_multipliers(timed, everything, constants, start)),
        num_runs=len(timed),
        relative_error=half_width(timed, everything, constants, start),
    )


def as_multipliers(logarithms: Floats) -> tuple[float, float, float]:
    """Return the three as Stack has them."""
    compute, communication, overhead = np.exp(logarithms).tolist()
    return compute, communication, overhead


def fit_multipliers(
    runs: TimedRuns, used: Floats, constants: Constants, start: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> Floats:
    """Return the logarithms [3] of the multipliers of one stack's runs, fitted on those that are `used` (1 or 0)."""

    def predict(logarithms: Floats) -> Floats:
        return runs.log_predicted_s(constants, np.repeat(logarithms[:, None], len(runs), axis=1))

    def slopes(logarithms: Floats, predicted: Floats) -> Floats:
        nudges = np.eye(len(MULTIPLIERS)) * _NUDGE
        return np.stack([(predict(logarithms + nudge) - predicted) / _NUDGE for nudge in nudges], axis=1)

    unknowns = Unknowns(np.array(start), np.array(_SPREADS), np.log(LOWEST), np.log(HIGHEST))
    return minimise(Problem(predict, slopes, runs.log_measured_s, used * 1.0, unknowns, noise=_NOISE))


def half_width(
    runs: TimedRuns, used: Floats, constants: Constants, start: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> float:
    """Return the half width of the 80 % interval, as a share of the step, that the used runs of one stack suggest."""
    errors = []
    for row in np.flatnonzero(used):
        others = used * (np.arange(len(runs)) != row)
        logarithms = fit_multipliers(runs, others, constants, start)
        predicted = runs.log_predicted_s(constants, np.repeat(logarithms[:, None], len(runs), axis=1))
        errors.append(abs(math.expm1(runs.log_measured_s[row] - predicted[row])))
    mean = (sum(errors) + _USUAL_WEIGHT * USUAL_ERROR) / (len(errors) + _USUAL_WEIGHT)
    return _LAPLACE_80 * mean
