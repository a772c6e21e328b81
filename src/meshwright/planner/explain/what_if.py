"""sensitivities and what_ifs: the step on slower hardware than the catalogue has, and with what the job rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshwright.cost.arrays import Floats
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import LayoutTable
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.price import price, steps_of_each_s
from meshwright.spec.frozen import Frozen
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.figure import Figure
from meshwright.spec.run.layout_plan import Sensitivity, WhatIf

_COMPUTE = ("dense_flops_per_s", "measured_matmul_flops_per_s", "matmul_points", "attention_points")
_MEMORY = ("memory_bytes_per_s", "measured_memory_bytes_per_s", "memory_op_points")
_BANDWIDTH = ("bytes_per_s", "bytes_per_s_per_peer")


def scaled_compute(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the matmul and attention rates of its device times `factor`."""
    return cluster.replace(device=_with_scaled(cluster.device, _COMPUTE, factor))


def scaled_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of its device's memory times `factor`."""
    return cluster.replace(device=_with_scaled(cluster.device, _MEMORY, factor))


def scaled_domain(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth inside nodes times `factor`."""
    return cluster.replace(intra_node=_scaled_link(cluster.intra_node, factor))


def scaled_network(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth between nodes times `factor`."""
    return cluster.replace(inter_node=_scaled_link(cluster.inter_node, factor))


def _scaled_link(link: Link | None, factor: float) -> Link | None:
    if link is None:
        return None
    points = tuple(_with_scaled(point, ("bytes_per_s",), factor) for point in link.collectives)
    scaled: Link = _with_scaled(link, _BANDWIDTH, factor)
    return scaled.replace(collectives=points)


def _with_scaled(data: Any, names: tuple[str, ...], factor: float) -> Any:
    """Return `data` with every figure in the fields called `names` multiplied by `factor`."""
    return data.replace(**{name: _scaled(getattr(data, name), factor) for name in names})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Figure):
        return value.replace(value=value.value * factor)
    if isinstance(value, Frozen):
        return value.replace(**{name: _scaled(getattr(value, name), factor) for name in type(value).model_fields})
    return tuple(_scaled(each, factor) for each in value) if isinstance(value, tuple) else value


_CHANGES: tuple[tuple[str, Callable[[Cluster, float], Cluster], float], ...] = (
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
