"""step_times: seconds of one optimizer step by component, of many cases at once, on devices and on hosts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from meshwright.cost.calibrated.host_step import HostStepPricer
from meshwright.cost.case import Cases
from meshwright.cost.constants import Constants, fitted_constants
from meshwright.cost.step import StepPricer, StepTerms


def step_times(cases: Cases, constants: Constants | None = None) -> StepTerms:
    """Return the step of each case by component, with the fitted constants unless others are given."""
    constants = fitted_constants() if constants is None else constants
    is_host = cases.each(lambda s: float(s.cluster.device.is_host)) > 0
    if is_host.all() or not is_host.any():
        return step_pricer(cases).price(constants)
    steps = {kind: step_pricer(cases.take(is_host == kind)).price(constants) for kind in (False, True)}
    joined = {field.name: np.zeros(len(cases)) for field in fields(StepTerms)}
    for kind, step in steps.items():
        for name, column in joined.items():
            column[is_host == kind] = getattr(step, name)
    return StepTerms(**joined)


def step_pricer(cases: Cases) -> StepPricer:
    """Return what prices `cases`, all of which are of devices or all of hosts (Device.is_host)."""
    kinds = {cases.settings[position].cluster.device.is_host for position in np.unique(cases.setting)}
    assert len(kinds) <= 1, "cases of devices and of hosts"
    return HostStepPricer(cases) if kinds == {True} else StepPricer(cases)
