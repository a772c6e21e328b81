"""Why the pick wins: for each key, the best layout that fits and has another value of it than the pick."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.arrays import Bools
from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.planner.candidate import candidate_at
from meshwright.planner.explain.explain import KEYS, change_of
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import best_of
from meshwright.planner.search.price import Priced, price
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import keeps_alike, reduces_alike
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Candidate, Contrast

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
            change = _change_of(pick.layout, other.layout, key)
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


def _change_of(pick: Layout, other: Layout, key: str) -> str:
    """Return a column's value in `other` as a job would write it, behind the axis that it needs if that changes too."""
    axis = _AXIS_OF.get(key)
    needed = [] if axis is None or getattr(pick, axis) == getattr(other, axis) else [change_of(other, axis)]
    return ", ".join([*needed, change_of(other, key)])


def extra_s(pick: Candidate, other: Candidate) -> dict[str, float]:
    """Return by term what `other` takes more than `pick`, seconds, without the terms that are equal."""
    differences = other.estimate.step.minus(pick.estimate.step)
    return {name: value for name, value in differences.items() if abs(value) > _LEAST_DIFFERENCE_S}
