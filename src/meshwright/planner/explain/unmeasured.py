"""Features of a layout that no measured run backs, and how much they widen the interval of its step time.

None of the 677 published runs (validation/published_runs.csv) has a split backward, a ring or an exchange of heads
among context-parallel ranks. Nine have async_tp, all with torchtitan (mean error 6 %), none with Meshwright.

A feature without a row is like software without a row: the error of its formula is not known from data. So each adds
the 80 % interval of the stacks that were left out of the fit (17.4 %, docs/accuracy.md), as an independent error:

    relative error = sqrt(stack's ^ 2 + number of features x 0.174 ^ 2)
"""

from __future__ import annotations

import math

from meshwright.cost.stacks import GENERIC, load_stack
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES, Layout

LEFT_OUT_ERROR = load_stack(GENERIC).relative_error
"""Half width of the interval that holds 80 % of the runs of stacks that were left out of the fit."""


def unmeasured_features(layout: Layout, setup: TrainingSetup) -> tuple[str, ...]:
    """Return the features of `layout` that no measured run of this software has, as a job would write them."""
    found = []
    if setup.is_low_precision and setup.is_own:
        found.append(f"precision={setup.workload.precision} (meshwright does not train in it yet)")
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        found.append(f"schedule={layout.schedule} (split backward)")
    if layout.cp > 1 and layout.cp_method != "all-gather":
        found.append(f"cp_method={layout.cp_method}")
    if layout.tp > 1 and layout.async_tp:
        found.append("async_tp=true (measured with torchtitan only)")
    return tuple(found)


def widened(relative_error: float, num_features: int) -> float:
    """Return the relative error of a stack's step time with so many features that no measured run backs."""
    return math.hypot(relative_error, *[LEFT_OUT_ERROR] * num_features)
