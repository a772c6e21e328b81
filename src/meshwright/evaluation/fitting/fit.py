"""fit: the constants of constants.toml and three multipliers for each stack, from measured runs.

A source of many runs counts more than one of few, but less than in proportion: its weight is its runs ^ 0.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.arrays import Bools, Floats
from meshwright.cost.constants import CostConstant, all_constants
from meshwright.evaluation.fitting.robust import Regression, Unknowns, minimise
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
