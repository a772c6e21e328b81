"""Bounds: seconds that no layout stays below which shares the model so and spends memory so.

    bound = a step without sends, of the least bubble and recomputation and the fastest method of cp

Ways to spend memory are what is recomputed, whether unsharded parameters are freed, and whether whole gradients add
up. One that fits with none of
the schedules that may be the leanest is left out: 1F1B, and those whose ranks hold several smaller stages, since cuts
between blocks then fall more evenly. What waits in the host's memory and how many chunks a loss has is as each layout
of a table says (memory_keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cost.layout_table import (
    ACTIVATION_CHECKPOINTS,
    CONTEXT_METHODS,
    Bools,
    Floats,
    LayoutTable,
    concatenate,
)
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import least_waiting, steady_s
from meshwright.planner.search.menu import Menu, pipeline_options
from meshwright.planner.search.price import time_steps, weigh
from meshwright.planner.search.rules import splits_model
from meshwright.planner.search.space import WAYS, reduces_needlessly, vary, with_ways
from meshwright.spec.layout.layout import SCHEDULES

_SLACK = 0.05
"""Share of the memory by which choices that are not varied here may still be leaner."""
_LEAN = ("ZBVZeroBubble", "Interleaved1F1B")
"""Schedules of several stages on each rank that hold no more than others of theirs."""


@dataclass(frozen=True)
class Bounds:
    """One element for each split of the model over the ranks and each way to spend memory."""

    layouts: LayoutTable
    """The split and the way; other choices are any."""
    least_s: Floats
    """What no layout of the split and the way stays below."""

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, rows: Any) -> Bounds:
        """Return the bounds at `rows` (positions or a mask)."""
        return Bounds(self.layouts.take(rows), self.least_s[rows])


def joined(parts: Sequence[Bounds]) -> Bounds:
    """Return the bounds of all `parts`, in order."""
    return Bounds(concatenate([part.layouts for part in parts]), np.concatenate([part.least_s for part in parts]))


def bounds_of(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> Bounds:
    """Return the bounds of each split and each way to spend memory."""
    gains_s = _most_gained_s(candidates, request, menu)
    layouts = with_ways(candidates, menu)
    gains_s = np.repeat(gains_s, len(layouts) // max(1, len(candidates)))
    useful = ~reduces_needlessly(layouts, request, menu)
    layouts, gains_s = layouts.take(useful), gains_s[useful]
    return Bounds(layouts, _least_s(_fastest(layouts, menu), gains_s, request, menu))


def least_of_splits_s(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> Floats:
    """Return the seconds that no layout of each split stays below, however it spends memory."""
    # To recompute nothing is the fastest, unless what is kept is copied.
    codes = _codes(menu) if candidates.activation_offload.any() else {min(_codes(menu))}
    sent = _with_columns(candidates, _least_sent(menu))
    tables = [_fastest(_with_columns(sent, {"activation_checkpoint": code}), menu) for code in codes]
    gains_s = _most_gained_s(candidates, request, menu)
    return np.asarray(np.min([_least_s(table, gains_s, request, menu) for table in tables], axis=0))


def least_of_ways_s(layouts: LayoutTable, request: PlanRequest, menu: Menu) -> Floats:
    """Return the seconds that no layout stays below which shares the model and spends memory as one of `layouts`."""
    fastest = _fastest(layouts, menu)
    return _least_s(fastest, _gain_of_cp_method_s(fastest, request, menu), request, menu)


def _most_gained_s(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> Floats:
    """Return by how many seconds the fastest method of cp can be faster than the one that each split has."""
    # The methods of cp differ most where most is recomputed, in what attention computes as in what it exchanges, or
    # where blocks that recompute some of it are fused, and where least is gathered and reduced on the same links.
    fastest = _with_columns(_fastest(candidates, menu), _least_sent(menu))
    fastest = _with_columns(fastest, {"activation_checkpoint_every": 1})
    differing = [_with_columns(fastest, {"activation_checkpoint": code}) for code in _codes(menu)]
    return np.asarray(np.max([_gain_of_cp_method_s(table, request, menu) for table in differing], axis=0))


def _codes(menu: Menu) -> set[int]:
    return {ACTIVATION_CHECKPOINTS.index(way) for way in menu.activation_checkpoint}


def _least_sent(menu: Menu) -> dict[str, bool]:
    return {
        "is_resharded": all(menu.is_resharded),
        "reduces_each_microbatch": all(menu.reduces_each_microbatch),
    }


def has_room(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return of each split whether any layout of it may fit, however it spends memory."""
    return _may_fit(leanest(candidates, menu), request, menu)


def may_fit(layouts: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return of each split, with its way to spend memory, whether any layout of it may fit."""
    lean = leanest(layouts, menu, **{name: getattr(layouts, name) for name in WAYS})
    fits = _may_fit(lean, request, menu)
    # What is recomputed is held next to what is kept: fewer such blocks can be leaner than more.
    rows = np.flatnonzero(~fits & (layouts.activation_checkpoint > 0))
    every = {"activation_checkpoint_every": max(menu.activation_checkpoint_every)}
    fits[rows] = _may_fit(_with_columns(lean.take(rows), every), request, menu)
    return fits


def fits_simply(layouts: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return of each split, with its way to spend memory, whether it may fit with one stage on each rank."""
    return _has_room(leanest(layouts, menu, **{name: getattr(layouts, name) for name in WAYS}), request)


def leanest(candidates: LayoutTable, menu: Menu, **changes: Any) -> LayoutTable:
    """Return each split with the choices that need least memory, but for `changes` of columns.

    What waits in the host's memory and the chunks of the loss stay as they are.
    """
    # A ring holds the keys of two ranks where a gather holds all, and is allowed wherever that is.
    gathers = candidates.cp_method == CONTEXT_METHODS.index("all-gather")
    is_ring = gathers & ("ring" in menu.cp_method)
    columns = {
        # No schedule of one stage a rank holds less, even where there are too few microbatches for this one to run.
        "schedule": SCHEDULES.index("1F1B"),
        "stages_per_rank": 1,
        "cp_method": np.where(is_ring, CONTEXT_METHODS.index("ring"), candidates.cp_method),
        "activation_checkpoint": max(map(ACTIVATION_CHECKPOINTS.index, menu.activation_checkpoint)),
        "is_resharded": any(menu.is_resharded),
        # Where nothing is sharded, shards of gradients are as large as whole ones.
        "reduces_each_microbatch": np.where(
            candidates.fsdp > 1, any(menu.reduces_each_microbatch), all(menu.reduces_each_microbatch)
        ),
        # What it joins with a reduce-scatter is recomputed, not kept.
        "async_tp": (candidates.tp > 1) & any(menu.async_tp) & any(menu.compile),
        "compile": any(menu.compile),
    }
    return _with_columns(candidates, columns | changes)


def _fastest(candidates: LayoutTable, menu: Menu) -> LayoutTable:
    """Return the layouts with the choices besides their way to spend memory that take least time."""
    columns = {
        "schedule": SCHEDULES.index("GPipe"),
        "stages_per_rank": 1,
        "async_tp": (candidates.tp > 1) & any(menu.async_tp),
        "activation_checkpoint_every": np.where(
            candidates.activation_checkpoint > 0, max(menu.activation_checkpoint_every), 1
        ),
        "compile": any(menu.compile),
    }
    return _with_columns(candidates, columns)


def _gain_of_cp_method_s(table: LayoutTable, request: PlanRequest, menu: Menu) -> Floats:
    """Return by how many seconds the fastest method of cp is faster than the one that each layout has."""
    own_s, least_s = table.cp * 0.0, table.cp * 0.0
    codes = [CONTEXT_METHODS.index(word) for word in menu.cp_method]
    rows = np.flatnonzero(table.cp > 1)
    if len(rows) and len(codes) > 1:
        taken = table.take(rows)
        others = [_with_columns(taken, {"cp_method": code}) for code in codes]
        changed = [
            np.flatnonzero(splits_model(other, request) & (taken.cp_method != other.cp_method)) for other in others
        ]
        tables = [taken, *(other.take(row) for other, row in zip(others, changed, strict=True))]
        step = time_steps(concatenate(tables), request)
        attention_s = (
            step.cp_communication_s + step.attention_inefficiency_s + step.memory_bound_ops_s + step.recomputation_s
        )
        own, *each = np.split(attention_s, np.cumsum([len(table) for table in tables])[:-1])
        own_s[rows] = least_s[rows] = own
        for row, seconds in zip(changed, each, strict=True):
            least_s[rows[row]] = np.minimum(least_s[rows[row]], seconds)
    return own_s - least_s


def _least_s(table: LayoutTable, gains_s: Floats, request: PlanRequest, menu: Menu) -> Floats:
    """Return steps without sends, and with the bubble of the schedule that waits least."""
    least_s = _without_sends_s(table, gains_s, request, menu)
    # What is recomputed is not copied: with all blocks recomputed a step may be shorter than with fewer.
    rows = np.flatnonzero(table.activation_offload & (table.activation_checkpoint_every > 1))
    if len(rows):
        every = _with_columns(table.take(rows), {"activation_checkpoint_every": 1})
        least_s[rows] = np.minimum(least_s[rows], _without_sends_s(every, gains_s[rows], request, menu))
    return least_s


def _without_sends_s(table: LayoutTable, gains_s: Floats, request: PlanRequest, menu: Menu) -> Floats:
    step = time_steps(table, request)
    waiting_s = (steady_s(step) - gains_s) * least_waiting(table, menu.pipelines, request)
    return np.asarray(step.total_s - step.pipeline_bubble_s - step.pipeline_p2p_s - gains_s + waiting_s)


def _may_fit(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    fits = _has_room(candidates, request)
    rows = np.flatnonzero(~fits & (candidates.pp > 1))
    pipelines = [pipeline for pipeline in menu.pipelines if pipeline[0] in _LEAN]
    if len(rows) and pipelines:
        others = vary(candidates.take(rows), pipeline_options(pipelines))
        fits[rows] = _has_room(others, request).reshape(len(rows), len(pipelines)).any(axis=1)
    return fits


def _has_room(candidates: LayoutTable, request: PlanRequest) -> Bools:
    least_bytes = request.margin_bytes - _SLACK * request.cluster.device.usable_memory_bytes
    _, headroom = weigh(candidates, request, least_bytes)
    return np.asarray(headroom >= least_bytes)


def _with_columns(candidates: LayoutTable, columns: dict[str, Any]) -> LayoutTable:
    """Return the layouts with other values in some columns, one for all or one each."""
    changed = {}
    for name, value in columns.items():
        column = getattr(candidates, name)
        changed[name] = np.broadcast_to(np.asarray(value, column.dtype), column.shape)
    return replace(candidates, **changed)
