"""What would be, were the hardware slower than it says, or the job allowed what it does not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.cost.arrays import Floats
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import LayoutTable
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.explain.hardware_change import (
    Change,
    scaled_compute,
    scaled_domain,
    scaled_memory,
    scaled_network,
)
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.price import price, steps_of_each_s
from meshwright.spec.run.plan import Sensitivity, WhatIf

_CHANGES: tuple[tuple[str, Change, float], ...] = (
    ("matmul and attention rates", scaled_compute, -0.2),
    ("memory bandwidth", scaled_memory, -0.2),
    ("bandwidth inside nodes", scaled_domain, -0.2),
    ("bandwidth between nodes", scaled_network, -0.2),
)
LATENCIES = ("collective_s", "exchange_s", "send_s")
"""The constants of the cost model that a collective or a send takes however small it is."""
_LATENCY_CHANGE = 1.0
_LOW_PRECISIONS = (("float8", "float8-tensorwise"), ("float4", "nvfp4"))


def sensitivities(finalists: LayoutTable, request: PlanRequest) -> list[Sensitivity]:
    """Return how the step of the first of `finalists`, and of the best of them, changes with each kind of figure."""
    changed = [(what, relative, change(request.cluster, 1 + relative)) for what, change, relative in _CHANGES]
    changed = [(what, relative, cluster) for what, relative, cluster in changed if cluster != request.cluster]
    others = [request.with_setup(cluster=cluster) for _, _, cluster in changed]
    before_s, *after_s = steps_of_each_s(finalists, [request, *others])
    slower = {name: value * (1 + _LATENCY_CHANGE * (name in LATENCIES)) for name, value in fitted_constants().items()}
    after_s.append(steps_of_each_s(finalists, [request], slower)[0])
    names = [*((what, relative) for what, relative, _ in changed), ("start of a collective", _LATENCY_CHANGE)]
    return [
        _sensitivity(what, relative, times_s / before_s[0] - 1, finalists, request)
        for (what, relative), times_s in zip(names, after_s, strict=True)
    ]


def _sensitivity(
    what: str, relative: float, changes: Floats, finalists: LayoutTable, request: PlanRequest
) -> Sensitivity:
    best = int(np.argmin(changes))
    return Sensitivity(
        what=what,
        change=relative,
        pick_change=float(changes[0]),
        best_change=float(changes[best]),
        best=layout_at(finalists, best, request),
    )


def what_ifs(finalists: LayoutTable, request: PlanRequest) -> Iterator[WhatIf]:
    """Yield the best of `finalists` in each lower precision that the device has and the job does not ask for."""
    if request.workload.precision != "bfloat16":
        return
    for dtype, precision in _LOW_PRECISIONS:
        if request.cluster.device.peak_flops_per_s(dtype) is None:
            continue
        lower = request.with_setup(workload=request.workload.replace(precision=precision))
        priced = price(finalists, lower)
        if len(priced):
            best = candidate_at(priced, int(priced.by_time[0]), lower)
            note, is_ours = "changes numerics", request.setup.is_own
            if is_ours:
                note += ", and the trainer does not compute it yet: a figure for other software"
            yield WhatIf(change=f"precision {precision}", best=best, note=note, is_runnable=not is_ours)
