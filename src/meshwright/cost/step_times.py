"""step_times: seconds of one optimizer step by component, of many configurations at once, on devices and on hosts."""

from dataclasses import fields

import numpy as np

from meshwright.cost.constants import Constants, fitted_constants
from meshwright.cost.host.host_step import HostStepPricer
from meshwright.cost.layout_table import Bools
from meshwright.cost.memory.activation_copies import StageCopies
from meshwright.cost.memory.footprint_stages import fullest_parameters
from meshwright.cost.step import StepPricer, StepTerms
from meshwright.cost.training_setup import Configurations


def step_times(configs: Configurations, constants: Constants | None = None) -> StepTerms:
    """Return the step of each configuration by component, with the fitted constants unless others are given."""
    constants = fitted_constants() if constants is None else constants
    is_host = _is_host(configs)
    if is_host.all() or not is_host.any():
        return step_pricer(configs).price(constants)
    steps = {kind: step_pricer(configs.take(is_host == kind)).price(constants) for kind in (False, True)}
    joined = {field.name: np.zeros(len(configs)) for field in fields(StepTerms)}
    for kind, step in steps.items():
        for name, column in joined.items():
            column[is_host == kind] = getattr(step, name)
    return StepTerms(**joined)


def step_pricer(configs: Configurations) -> StepPricer:
    """Return what prices `configs`, all of which are of devices or all of hosts."""
    is_host = _is_host(configs)
    assert is_host.all() or not is_host.any(), "configurations of devices and of hosts"
    return HostStepPricer(configs) if is_host.any() else StepPricer(configs)


def _is_host(configs: Configurations) -> Bools:
    return configs.has(lambda setup: setup.cluster.device.is_host)


def unit_shares(configs: Configurations) -> list[list[float]]:
    """Return for each configuration, all of one model, what each unit that a stage can hold (embedding, blocks, norm
    with head and loss) takes of a microbatch's time through the whole model.

    Without gathers and reductions: a pipeline's stages gather ahead and reduce when they are done; and without copies
    of activations, which are not as many as the blocks (stage_copies).
    """
    model = configs.setups[configs.setup_index[0]].trained_model
    passes = step_pricer(configs).block_passes(fitted_constants())
    seconds_of = {
        group.ops: (one.total - one.dp - one.activation_copies).tolist()
        for group, (_, one) in zip(model.distinct_groups, passes, strict=True)
    }
    units = [one for group in model.groups for one in [seconds_of[group.ops]] * group.count]
    return [_shares(seconds) for seconds in zip(*units, strict=True)]


def stage_copies(configs: Configurations) -> list[StageCopies]:
    """Return what copies of activations (layout.activation_offload) expose in a stage of each configuration."""
    if not configs.layouts.activation_offload.any():
        return [StageCopies(0.0, 0.0, 0.0)] * len(configs)
    pricer = step_pricer(configs)
    blocks, _, _ = pricer.passes(fitted_constants())
    number = pricer.stage.num_blocks
    forward, back = blocks.activation_copies - blocks.copies_back, blocks.copies_back
    return pricer.activations.of_stages(forward / number, back / number)


def update_shares(configs: Configurations) -> list[float]:
    """Return for each configuration what the fullest pipeline rank updates, for which the others wait, as a multiple of
    what a step's optimizer is priced for.
    """
    priced, fullest = step_pricer(configs).parallel.updated, np.zeros(len(configs))
    for position in np.unique(configs.setup_index):
        rows = np.flatnonzero(configs.setup_index == position)
        fullest[rows] = fullest_parameters(configs.setups[position], configs.layouts.take(rows))
    # Updates of hosts are priced by their own measurements (cost/host).
    is_ours = configs.has(lambda setup: setup.is_own_on_device)
    shares = np.where(is_ours & (configs.layouts.pp > 1), fullest / priced, 1.0)
    return [float(share) for share in shares]


def _shares(units_s: tuple[float, ...]) -> list[float]:
    total_s = sum(units_s)
    return [unit_s / total_s for unit_s in units_s]
