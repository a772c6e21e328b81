"""configs_of: the layouts of a request as configurations that the cost formulas price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.training_setup import Configurations
from meshwright.planner.request import PlanRequest


def configs_of(layouts: LayoutTable, request: PlanRequest) -> Configurations:
    """Return the layouts in the request's setup; those that compile their blocks have compiled kernels."""
    setup = request.setup
    if setup.stack.kernels != "eager":
        return Configurations.of_one(setup, layouts)
    compiled = replace(setup, stack=setup.stack.replace(kernels="compiled"))
    return Configurations((setup, compiled), layouts.compiles_blocks.astype(np.int64), layouts)
