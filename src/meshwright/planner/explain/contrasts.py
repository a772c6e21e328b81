"""Why the pick wins: against other values of each key, on slower hardware, and with what the job rules out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Bools, Floats, LayoutTable, concatenate, layout_table
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.explain.explain import KEYS, change_of
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import best_of
from meshwright.planner.search.menu import memory_options, menu_of
from meshwright.planner.search.price import Priced, price, steps_of_each_s
from meshwright.planner.search.rules import is_valid, shares_batch
from meshwright.planner.search.space import keeps_alike, reduces_alike, vary, with_memory_options, with_ways
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.float8_ladder import obstacle
from meshwright.spec.job.sections import Float8Recipe
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import Figure
from meshwright.spec.run.layout_plan import Candidate, Contrast, Sensitivity, WhatIf
from meshwright.spec.step.workload import FLOAT8_PRECISIONS, Precision

_AXIS_OF = {"schedule": "pp", "cp_method": "cp", "async_tp": "tp"}
"""Keys that do something only where an axis has several ranks."""
_IDLE_KEYS = {"is_resharded": "reshard_after_forward", "reduces_each_microbatch": "gradient_sync"}
"""Columns of two values, with their keys, that do nothing for some layouts: a search then prices the default alone."""
_LEAST_DIFFERENCE_S = 1e-9
_MOST_ACTIONS = 3_000
"""Pipeline actions that are replayed for one key."""


def contrasts(priced: Priced, best: list[Candidate], pick: Candidate, request: PlanRequest) -> dict[str, Contrast]:
    """Return, by column of a table, the best layout that fits and has another value of it than the pick, closest first.

    `best` are finalists, which have been replayed.
    """
    own, table = layout_table([pick.layout]), layout_table([candidate.layout for candidate in best])
    found = {}
    for key in KEYS:
        others = [best[row] for row in np.flatnonzero(has_another(table, own, key))]
        others += best_of(priced, priced.fastest(has_another(priced.layouts, own, key)), pick, request, _MOST_ACTIONS)
        others += _idle(priced, own, key, request)
        if others:
            other = min(others, key=lambda candidate: candidate.step_s)
            change = _change_of(
                pick.layout, other.layout, key, is_idle_faster=_is_idle_faster(priced, best, key, other)
            )
            found[key] = Contrast(change=change, other=other, change_by_component_s=extra_s(pick, other))
    return dict(sorted(found.items(), key=lambda item: item[1].other.step_s))


def has_another(table: LayoutTable, own: LayoutTable, key: str) -> Bools:
    """Return which layouts have another value of a column than the only one of `own`, and one that does something."""
    is_other = getattr(table, key) != getattr(own, key)[0]
    return np.asarray(is_other & (getattr(table, _AXIS_OF[key]) > 1) if key in _AXIS_OF else is_other)


def may_have_another(table: LayoutTable, own: LayoutTable, key: str, request: PlanRequest) -> Bools:
    """Return which layouts have another value of a column than `own`, or would with choices that are not made yet."""
    if key in _AXIS_OF:
        return np.asarray(getattr(table, _AXIS_OF[key]) > 1)
    is_other = has_another(table, own, key)
    return np.asarray(is_other | _is_idle(table, key, request) if key in _IDLE_KEYS else is_other)


def _idle(priced: Priced, own: LayoutTable, key: str, request: PlanRequest) -> list[Candidate]:
    """Return the fastest layout that a key does nothing for, with another value of it than `own`, if it is valid."""
    if key not in _IDLE_KEYS or _IDLE_KEYS[key] in request.fixed:
        return []
    rows = priced.fastest(_is_idle(priced.layouts, key, request))[:1]
    value = ~getattr(own, key)[0]
    table = replace(priced.layouts.take(rows), **{key: np.full(len(rows), value)})
    table = table.take(is_valid(table, request))
    variants = price(table, request) if len(table) else priced.take(rows[:0])
    return [candidate_at(variants, row, request) for row in range(len(variants))]


def _is_idle(table: LayoutTable, key: str, request: PlanRequest) -> Bools:
    return keeps_alike(table) if key == "is_resharded" else reduces_alike(table, request)


def _is_idle_faster(priced: Priced, best: list[Candidate], key: str, other: Candidate) -> bool:
    """Return whether a layout that a key does nothing for, without its axis, is faster than `other`."""
    if key not in _AXIS_OF:
        return False
    axis = _AXIS_OF[key]
    replayed = any(getattr(one.layout, axis) == 1 and one.step_s < other.step_s for one in best)
    return replayed or bool((priced.total_s[getattr(priced.layouts, axis) == 1] < other.step_s).any())


def _change_of(pick: Layout, other: Layout, key: str, *, is_idle_faster: bool) -> str:
    """Return a column's value in `other` as a job would write it, behind the axis that it needs if that changes too.

    The axis is also named where a plan that keeps the key alone would drop the axis and so the key's effect.
    """
    axis = _AXIS_OF.get(key)
    is_kept = axis is None or (getattr(pick, axis) == getattr(other, axis) and not is_idle_faster)
    needed = [] if is_kept or axis is None else [change_of(other, axis)]
    return ", ".join([*needed, change_of(other, key)])


def extra_s(pick: Candidate, other: Candidate) -> dict[str, float]:
    """Return by term what `other` takes more than `pick`, seconds, without the terms that are equal."""
    differences = other.estimate.step.minus(pick.estimate.step)
    return {name: value for name, value in differences.items() if abs(value) > _LEAST_DIFFERENCE_S}


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
_NUM_VARIED = 4
"""Finalists whose ways to spend memory are all priced in a lower precision; all of ten take as long as a tenth of a
plan."""
_LOW_PRECISIONS: tuple[tuple[str, Precision], ...] = (("float8", "float8-tensorwise"), ("float4", "nvfp4"))


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
    """Yield the best of `finalists`, also with other ways to spend memory, in each lower precision that the device has
    and the job does not ask for.
    """
    if request.workload.precision != "bfloat16":
        return
    for dtype, precision in _LOW_PRECISIONS:
        if request.cluster.device.peak_flops_per_s(dtype) is None:
            continue
        words, is_ours = _setting(precision, request)
        if not words:
            continue
        lower = request.with_setup(workload=request.workload.replace(precision=precision))
        # Some precisions go with no async_tp.
        plain = replace(finalists, async_tp=np.zeros(len(finalists), np.bool_))
        possible = concatenate([finalists, plain, _with_other_memory(plain, request)])
        possible = possible.take(is_valid(possible, lower))
        if len(possible) and len(priced := price(possible, lower)):
            best = candidate_at(priced, int(priced.by_time[0]), lower)
            note = "changes numerics"
            if not is_ours:
                note += ", and the trainer does not compute it yet: a figure for other software"
            yield WhatIf(change=words, best=best, note=note, is_runnable=is_ours)


def _with_other_memory(finalists: LayoutTable, request: PlanRequest) -> LayoutTable:
    """Return the first of `finalists` with every microbatch and way to spend memory: another precision needs less."""
    menu = menu_of(request)
    table = vary(finalists.take(np.arange(min(len(finalists), _NUM_VARIED))), {"microbatch_size": menu.microbatch_size})
    table = table.take(shares_batch(table, request))
    return with_memory_options(with_ways(table, menu), memory_options(menu))


def _setting(precision: Precision, request: PlanRequest) -> tuple[str, bool]:
    """Return what asks for `precision`, "" where the device does not run it, and whether what is planned for can."""
    if not request.setup.is_own:
        return f"--precision {precision}", True
    recipe = next((one for one in get_args(Float8Recipe) if FLOAT8_PRECISIONS.get(one) == precision), None)
    if recipe is None:
        return f"--precision {precision}", False
    return ("" if obstacle(recipe, request.cluster.device) else f"precision.float8={recipe}"), True
