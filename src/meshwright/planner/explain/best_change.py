"""best_changes: the change of one job key that is predicted to save most, found by pricing all of them."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost.layout_table import layout_table
from meshwright.planner.candidate import candidate_at, judge, layout_at
from meshwright.planner.explain.explain import changes, listed, neighbours
from meshwright.planner.request import PlanRequest, rate_problem
from meshwright.planner.search.finalists import SHORT_PIPELINE
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import price
from meshwright.planner.search.rules import is_valid
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.step_waterfall import BestChange
from meshwright.spec.step.workload import FLOAT8_PRECISIONS, Precision

_NUM_REPLAYED = 4
"""Fastest neighbours whose pipelines are replayed: closed forms of bubbles may have them in another order."""


def best_changes(layout: Layout, request: PlanRequest) -> tuple[BestChange, ...]:
    """Return the change of a layout key that saves most, then one of the precision where that saves more.

    Every layout that differs from `layout` in one key, fits and is valid is priced; degrees take their ranks from data
    parallelism. Empty where no layout next to it fits, or none is faster.
    """
    now = judge(layout, request)
    error_s = now.estimate.relative_error * now.step_s
    found = [*_of_layout(layout, request), *_of_precision(layout, request)]
    saving = [
        BestChange(
            change=change,
            step_s=step_s,
            saved_s=now.step_s - step_s,
            error_s=error_s,
            changes_numerics=change.startswith("precision."),
        )
        for change, step_s in found
        if step_s < now.step_s
    ]
    saving.sort(key=lambda one: one.step_s)
    kept = next((place for place, one in enumerate(saving) if not one.changes_numerics), len(saving))
    best = saving[kept : kept + 1]
    return (*best, *saving[:1]) if kept else tuple(best)


def _of_layout(layout: Layout, request: PlanRequest) -> Iterator[tuple[str, float]]:
    """Yield the fastest changes of a layout key, with the predicted steps."""
    free = replace(request, fixed={})
    nearby = price(neighbours(layout, free, menu_of(free)), free)
    for row in nearby.by_time[:_NUM_REPLAYED].tolist():
        other = layout_at(nearby.layouts, row, free)
        # Another degree takes its ranks from dp_shard, which a job has to say, too.
        ranks = {} if other.dp_shard == layout.dp_shard else {"dp_shard": other.dp_shard}
        changed = {f"layout.{key}": value for key, value in (changes(layout, other) | ranks).items()}
        yield listed(changed), candidate_at(nearby, row, free, SHORT_PIPELINE).step_s


def _of_precision(layout: Layout, request: PlanRequest) -> Iterator[tuple[str, float]]:
    """Yield the lower precisions that the device has rates for and the trainer computes, with the predicted steps."""
    lower: dict[str, Precision] = {}
    if request.workload.precision == "float32":
        lower["precision.compute=bfloat16"] = "bfloat16"
    if request.workload.precision == "bfloat16":
        lower |= {f"precision.float8={recipe}": name for recipe, name in FLOAT8_PRECISIONS.items()}
    table = layout_table([layout])
    for change, precision in lower.items():
        other = request.with_setup(workload=request.workload.replace(precision=precision))
        if rate_problem(request.cluster.device, precision) is None and is_valid(table, other)[0]:
            priced = price(table, other)
            if len(priced):
                yield change, candidate_at(priced, 0, other, SHORT_PIPELINE).step_s
