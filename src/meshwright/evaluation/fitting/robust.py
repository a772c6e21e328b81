"""minimise: the unknowns that bring a model nearest to what was measured, near their priors and within their bounds.

    sum of weight x |residual| / noise + 1/2 sum of ((unknown - prior) / spread)^2

|r| is rounded to sqrt(r^2 + softness^2), so that it has a slope everywhere. Absolute values, not squares: a few unusual
measurements then move the fit no more than usual ones. All unknowns and measurements are logarithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.cost.arrays import Floats

_SOFTNESS = 0.02
_LARGEST_STEP = 0.5
_LEAST_GAIN = 0.02
_AT_BOUND = 1e-9


@dataclass(frozen=True)
class Unknowns:
    """What is sought, as logarithms, one element an unknown."""

    prior: Floats
    spread: Floats
    """Standard deviation of the prior."""
    low: Floats
    high: Floats

    def penalty(self, unknowns: Floats) -> float:
        """Return what `unknowns` cost for lying away from their priors."""
        return float(0.5 * (((unknowns - self.prior) / self.spread) ** 2).sum())


@dataclass(frozen=True)
class Regression:
    """A model to fit, and what it should give."""

    predict: Callable[[Floats], Floats]
    """From unknowns [unknowns] to predictions [rows]."""
    slopes: Callable[[Floats, Floats], Floats]
    """From unknowns and their predictions to derivatives [rows, unknowns]."""
    measured: Floats
    weights: Floats
    """How much each row counts; rows of weight 0 are left out."""
    unknowns: Unknowns
    noise: float = 0.05
    """Residual that costs as much as an unknown 1.4 spreads away."""

    def cost(self, unknowns: Floats, predicted: Floats) -> float:
        """Return what is minimised."""
        residuals = predicted - self.measured
        return float((self.weights * _rounded(residuals)).sum() / self.noise) + self.unknowns.penalty(unknowns)


def minimise(regression: Regression, max_steps: int = 8) -> Floats:
    """Return the unknowns of least cost that Gauss-Newton steps from the priors reach, [unknowns]."""
    unknowns = regression.unknowns.prior
    predicted = regression.predict(unknowns)
    cost = regression.cost(unknowns, predicted)
    for _ in range(max_steps):
        slopes = regression.slopes(unknowns, predicted)
        aim = _minimise_linear(regression, unknowns, predicted, slopes)
        before = cost
        unknowns, predicted, cost = _shorten(regression, unknowns, predicted, cost, aim)
        if before - cost < _LEAST_GAIN:
            break
    return unknowns


def _shorten(
    regression: Regression, start: Floats, predicted: Floats, cost: float, aim: Floats
) -> tuple[Floats, Floats, float]:
    """Return the first point from `aim` back towards `start` that costs less, its predictions and its cost."""
    for share in (1.0, 0.5, 0.25, 0.1):
        tried = start + share * (aim - start)
        there = regression.predict(tried)
        found = regression.cost(tried, there)
        if found < cost:
            return tried, there, found
    return start, predicted, cost


def _minimise_linear(regression: Regression, start: Floats, predicted: Floats, slopes: Floats) -> Floats:
    """Return the best unknowns if predictions were linear around `start`, found by reweighted least squares."""
    used = regression.weights > 0
    slopes, residuals_0 = slopes[used], (predicted - regression.measured)[used]
    weights, unknowns = regression.weights[used] / regression.noise, regression.unknowns
    low = np.maximum(unknowns.low, start - _LARGEST_STEP)
    high = np.minimum(unknowns.high, start + _LARGEST_STEP)
    precision = 1 / unknowns.spread**2
    best = start
    for _ in range(30):
        residuals = residuals_0 + slopes @ (best - start)
        reweighted = weights / _rounded(residuals)
        gradient = slopes.T @ (reweighted * residuals) + precision * (best - unknowns.prior)
        curvature = (slopes * reweighted[:, None]).T @ slopes + np.diag(precision)
        step = _bounded_step(curvature, gradient, best, low, high)
        best = best + step
        if np.abs(step).max(initial=0) < 1e-3:
            break
    return best


def _bounded_step(curvature: Floats, gradient: Floats, start: Floats, low: Floats, high: Floats) -> Floats:
    """Return the Newton step of the unknowns that no bound holds, clipped to the bounds."""
    is_held = ((start >= high - _AT_BOUND) & (gradient < 0)) | ((start <= low + _AT_BOUND) & (gradient > 0))
    free = np.flatnonzero(~is_held)
    step = np.zeros_like(start)
    step[free] = -np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
    return np.asarray(np.clip(start + step, low, high) - start)


def _rounded(residuals: Floats) -> Floats:
    return np.sqrt(residuals**2 + _SOFTNESS**2)
