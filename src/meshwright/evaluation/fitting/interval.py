"""interval_half_width: how wide an interval must be to hold 80 % of runs that the fit has not seen.

The 80th percentile of left-out errors of the stack itself. A stack of few runs says little of its own tails: the errors
of all stacks count as much as eight runs more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.training_setup import Floats

SHARE = 0.8
_OTHERS_WEIGHT = 8.0


def interval_half_width(own: Floats, everyone: Floats) -> float:
    """Return the half width as a share of the predicted step, from |measured / predicted - 1| of left-out runs."""
    errors = np.concatenate([own, everyone])
    weights = np.concatenate([np.ones(len(own)), np.full(len(everyone), _OTHERS_WEIGHT / max(1, len(everyone)))])
    order = np.argsort(errors)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(errors[order][np.searchsorted(reached, SHARE)])


def half_widths_by_fold(errors: Floats, stack: NDArray[np.str_], fold: NDArray[np.int64]) -> Floats:
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
