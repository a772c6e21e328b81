"""cases_of: the layouts of a request as cases that the cost formulas price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.case import Cases
from meshwright.cost.layout_table import LayoutTable
from meshwright.planner.request import PlanRequest


def cases_of(layouts: LayoutTable, request: PlanRequest) -> Cases:
    """Return the layouts in the request's setting; those that compile their blocks have compiled kernels."""
    setting = request.setting
    if setting.stack.kernels != "eager":
        return Cases.of_one(setting, layouts)
    compiled = replace(setting, stack=setting.stack.replace(kernels="compiled"))
    return Cases((setting, compiled), layouts.compiles_blocks.astype(np.int64), layouts)
