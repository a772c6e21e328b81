"""fit: the constants of constants.toml and three multipliers for each stack, from measured runs.

A source of many runs counts more than one of few, but less than in proportion: its weight is its runs ^ 0.6.

minimise: the unknowns that bring a model nearest to what was measured, near their priors and within their bounds:

    sum of weight x |residual| / noise + 1/2 sum of ((unknown - prior) / spread)^2

|r| is rounded to sqrt(r^2 + softness^2), so that it has a slope everywhere. Absolute values, not squares: a few unusual
measurements then move the fit no more than usual ones. All unknowns and measurements are logarithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.constants import CostConstant, all_constants
from meshwright.cost.layout_table import Bools, Floats
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns

SPREADS = (0.08, 0.25, 0.25)
"""Standard deviations of the logarithms of compute, communication, overhead from stack to stack."""
LOWEST, HIGHEST = (0.9, 0.4, 0.4), (1.45, 4.0, 3.0)
"""Bounds of the three."""
_SOURCE_EXPONENT = 0.6
_NUDGE = 1e-4


@dataclass(frozen=True)
class Fit:
    """What a fit found."""

    constants: dict[str, float]
    multipliers: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Compute, communication and overhead of each stack; 1 where it had no run."""

    def log_predicted_s(self, runs: TimedRuns) -> Floats:
        """Return the logarithm of each run's predicted step; a stack without multipliers is generic."""
        of_run = [self.multipliers.get(stack, (1.0, 1.0, 1.0)) for stack in runs.stack]
        return runs.log_predicted_s(self.constants, np.log(np.array(of_run).T))


def fit(runs: TimedRuns, used: Bools) -> Fit:
    """Return the constants fitted on the runs where `used` is true."""
    parameters = _Parameters(runs)
    regression = Regression(
        parameters.predict,
        parameters.slopes,
        runs.log_measured_s,
        source_weights(runs.source, used),
        parameters.unknowns,
    )
    return parameters.named(minimise(regression))


def source_weights(source: NDArray[np.str_], used: Bools) -> Floats:
    """Return each row's weight, 0 where it is not used."""
    weights = np.zeros(len(source))
    for name in set(source[used]):
        rows = used & (source == name)
        weights[rows] = 2 * rows.sum() ** (_SOURCE_EXPONENT - 1)
    return weights


class _Parameters:
    """All unknowns in one array: the free constants, then the three multipliers stack by stack."""

    def __init__(self, runs: TimedRuns) -> None:
        known = all_constants()
        self.runs, self.stacks = runs, runs.stacks
        self.free = {name: constant for name, constant in known.items() if constant.spread > 0}
        self.fixed = {name: constant.prior for name, constant in known.items() if constant.spread <= 0}
        self.stack_of_run = np.searchsorted(self.stacks, runs.stack)
        self.unknowns = self._unknowns(list(self.free.values()))

    def _unknowns(self, constants: list[CostConstant]) -> Unknowns:
        def both(of_constants: list[float], of_multipliers: tuple[float, ...]) -> Floats:
            return np.array([*of_constants, *of_multipliers * len(self.stacks)])

        return Unknowns(
            prior=np.log(both([constant.prior for constant in constants], (1.0, 1.0, 1.0))),
            spread=both([constant.spread for constant in constants], SPREADS),
            low=np.log(both([max(constant.low, 1e-12) for constant in constants], LOWEST)),
            high=np.log(both([constant.high for constant in constants], HIGHEST)),
        )

    def named(self, unknowns: Floats) -> Fit:
        values, multipliers = self._split(np.exp(unknowns))
        each = {stack: (row[0], row[1], row[2]) for stack, row in zip(self.stacks, multipliers.tolist(), strict=True)}
        return Fit(self._constants(values), each)

    def predict(self, unknowns: Floats) -> Floats:
        values, multipliers = self._split(unknowns)
        return self.runs.log_predicted_s(self._constants(np.exp(values)), multipliers[self.stack_of_run].T)

    def slopes(self, unknowns: Floats, predicted: Floats) -> Floats:
        slopes = np.zeros((len(predicted), len(unknowns)))
        for column in range(len(self.free)):
            nudged = unknowns.copy()
            nudged[column] += _NUDGE
            slopes[:, column] = (self.predict(nudged) - predicted) / _NUDGE
        for which in range(len(MULTIPLIERS)):
            # No run has two stacks: one nudge of all stacks gives the slopes of each.
            columns = len(self.free) + which + len(MULTIPLIERS) * self.stack_of_run
            nudged = unknowns.copy()
            nudged[columns] += _NUDGE
            slopes[np.arange(len(predicted)), columns] = (self.predict(nudged) - predicted) / _NUDGE
        return slopes

    def _split(self, unknowns: Floats) -> tuple[Floats, Floats]:
        """Return the constants' part and the multipliers, [stacks, 3]."""
        return unknowns[: len(self.free)], unknowns[len(self.free) :].reshape(len(self.stacks), len(MULTIPLIERS))

    def _constants(self, values: Floats) -> dict[str, float]:
        return {**self.fixed, **dict(zip(self.free, values.tolist(), strict=True))}


_SOFTNESS = 0.02
_LARGEST_STEP = 0.5
_LEAST_GAIN = 0.02
_MAX_STEPS = 8
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


def minimise(regression: Regression) -> Floats:
    """Return the unknowns of least cost that Gauss-Newton steps from the priors reach, [unknowns]."""
    unknowns = regression.unknowns.prior
    predicted = regression.predict(unknowns)
    cost = regression.cost(unknowns, predicted)
    for _ in range(_MAX_STEPS):
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
