"""step_times: seconds of one optimizer step by component, of many configurations at once, on devices and on hosts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from meshwright.cost.calibrated.host_step import HostStepPricer
from meshwright.cost.constants import Constants, fitted_constants
from meshwright.cost.step import StepPricer, StepTerms
from meshwright.cost.training_setup import Configurations


def step_times(configs: Configurations, constants: Constants | None = None) -> StepTerms:
    """Return the step of each configuration by component, with the fitted constants unless others are given."""
    constants = fitted_constants() if constants is None else constants
    is_host = configs.has(lambda s: s.cluster.device.is_host)
    if is_host.all() or not is_host.any():
        return step_pricer(configs).price(constants)
    steps = {kind: step_pricer(configs.take(is_host == kind)).price(constants) for kind in (False, True)}
    joined = {field.name: np.zeros(len(configs)) for field in fields(StepTerms)}
    for kind, step in steps.items():
        for name, column in joined.items():
            column[is_host == kind] = getattr(step, name)
    return StepTerms(**joined)


def step_pricer(configs: Configurations) -> StepPricer:
    """Return what prices `configs`, all of which are of devices or all of hosts (Device.is_host)."""
    kinds = {configs.setups[position].cluster.device.is_host for position in np.unique(configs.setup_index)}
    assert len(kinds) <= 1, "configurations of devices and of hosts"
    return HostStepPricer(configs) if kinds == {True} else StepPricer(configs)


def unit_shares(config: Configurations) -> list[float]:
    """Return what each unit that a stage can hold (embedding, blocks, norm with head and loss) takes of a microbatch's
    time through the whole model, of one configuration.

    Without gathers and reductions: a pipeline's stages gather ahead and reduce when they are done.
    """
    model = config.setups[config.setup_index[0]].model
    passes = step_pricer(config).block_passes(fitted_constants())
    seconds_of = {
        group.ops: float(one.total[0] - one.dp[0])
        for group, (_, one) in zip(model.distinct_groups, passes, strict=True)
    }
    seconds = [seconds_of[group.ops] for group in model.groups for _ in range(group.count)]
    total_s = sum(seconds)
    return [unit_s / total_s for unit_s in seconds]
