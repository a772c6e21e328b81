"""What lies next to the pick but does not fit, and how a layout's changes are written."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.layout_table import Bools, LayoutTable, concatenate, layout_table
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import SHORT_PIPELINE
from meshwright.planner.search.menu import LOSS_CHUNKS, Menu, pipeline_options
from meshwright.planner.search.price import Priced, host_use, price
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import is_needless, vary
from meshwright.spec.layout.auto_choices import auto_reduces_each_microbatch, auto_reshards
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import shown_value
from meshwright.spec.run.layout_plan import Candidate, Fix, Rejection
from meshwright.spec.step.estimate import MEMORY_CLASSES, MemoryUse
from meshwright.units import format_bytes

_DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate")
KEYS = (
    *_DEGREES,
    "microbatch_size",
    "schedule",
    "activation_checkpoint",
    "is_resharded",
    "reduces_each_microbatch",
    "cp_method",
    "async_tp",
)
"""Columns of a table whose other values a plan compares with."""
_BLOCKS = "activation_checkpoint_blocks"
_FEW_CHUNKS = 4
"""A quarter of the logits is often little enough, and its matmuls are as fast as that of all tokens."""
_NUM_FIXES = 3
_NUM_REJECTIONS = 5


def misfits(pick: Candidate, given: Candidate | None, request: PlanRequest, menu: Menu) -> list[Rejection]:
    """Return the layouts that do not fit and what would make them: the one given, and those one change from the pick.

    The latter come fastest first.
    """
    candidates = _nearby_misfits(pick, request, menu)
    if given is not None and not given.fits:
        candidates.insert(0, given)
    return [
        _misfit(candidate, _fitting_neighbours(candidate.layout, request, menu), pick, request)
        for candidate in candidates
    ]


def _fitting_neighbours(layout: Layout, request: PlanRequest, menu: Menu) -> Priced:
    """Return the layouts one change away that leave the margin free.

    Each layout's are priced by themselves: one that says what each block saves has columns that others lack.
    """
    priced = price(neighbours(layout, request, menu), request, only_fitting=False)
    return priced.take(np.flatnonzero(priced.headroom_bytes >= request.margin_bytes))


def _nearby_misfits(pick: Candidate, request: PlanRequest, menu: Menu) -> list[Candidate]:
    """Return the layouts one change away from the pick that do not fit, fastest first, one for each key."""
    nearby = price(neighbours(pick.layout, request, menu), request, only_fitting=False)
    fastest: dict[tuple[str, ...], int] = {}
    for row in np.argsort(nearby.total_s):
        if nearby.headroom_bytes[row] < request.margin_bytes:
            keys = tuple(changes(pick.layout, layout_at(nearby.layouts, int(row), request)))
            fastest.setdefault(keys[:1], int(row))
    candidates = [
        candidate_at(nearby, row, request, SHORT_PIPELINE) for row in list(fastest.values())[:_NUM_REJECTIONS]
    ]
    return sorted(candidates, key=lambda candidate: candidate.step_s)


def _misfit(candidate: Candidate, nearby: Priced, pick: Candidate, request: PlanRequest) -> Rejection:
    """Return why a layout does not fit, and of the layouts near it that do, the changes that cost least time."""
    broken = set(changes(pick.layout, candidate.layout))
    fixes: dict[tuple[str, ...], Fix] = {}  # the fastest of the same keys
    for row in np.argsort(nearby.total_s):
        if len(fixes) == _NUM_FIXES:
            break
        change = changes(candidate.layout, layout_at(nearby.layouts, int(row), request))
        # To take the change back is no news.
        if broken.isdisjoint(change) and (keys := tuple(change)) not in fixes:
            step_s = candidate_at(nearby, int(row), request, SHORT_PIPELINE).step_s
            fixes[keys] = Fix(change=listed(change), step_s=step_s)
    return Rejection(
        change=listed(changes(pick.layout, candidate.layout)) or "as it is",
        reason=_excess(candidate, pick.estimate.memory, request),
        step_s=candidate.step_s,
        fixes=tuple(fixes.values()),
    )


def neighbours(layout: Layout, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return the valid layouts that differ from `layout` in one key; a degree takes its ranks from data parallelism."""
    table = concatenate([*_other_degrees(layout, request, menu), *_other_choices(layout, request, menu)])
    return table.take(is_valid(table, request) & ~is_needless(table, request, menu))


def _other_degrees(layout: Layout, request: PlanRequest, menu: Menu) -> Iterator[LayoutTable]:
    own = layout_table([layout])
    for axis in _DEGREES:
        table = vary(own, {axis: [n for n in getattr(menu, axis) if n != getattr(layout, axis)] or [0]})
        table = table.take(getattr(table, axis) > 0)
        # Replicas stay as they are where they can; else all data-parallel ranks share one copy.
        ranks = request.num_devices // (table.tp * table.cp * table.pp)
        keeps = ranks % table.dp_replicate == 0
        replicas = np.where(keeps, table.dp_replicate, 1)
        table = replace(table, dp_replicate=replicas, dp_shard=np.maximum(1, ranks // replicas))
        yield _with_auto(table, layout).take(keeps | (axis != "dp_replicate"))


def _with_auto(table: LayoutTable, layout: Layout) -> LayoutTable:
    """Return `table` with what `layout` leaves to be chosen by degrees as its own degrees have it."""
    changed: dict[str, Any] = {}
    if layout.reshard_after_forward == "auto":
        changed["is_resharded"] = np.asarray(auto_reshards(table.pp))
    if layout.gradient_sync == "auto":
        changed["reduces_each_microbatch"] = np.asarray(auto_reduces_each_microbatch(table.fsdp, table.pp))
    return replace(table, **changed)


def _other_choices(layout: Layout, request: PlanRequest, menu: Menu) -> Iterator[LayoutTable]:
    own = layout_table([layout])
    options: list[Mapping[str, Any]] = [
        {key: getattr(menu, key)}
        for key in ("microbatch_size", "cp_method", "is_resharded", "reduces_each_microbatch", "async_tp", "compile")
    ]
    options += [pipeline_options(menu.pipelines)] if layout.pp > 1 else []
    options += _loss_choices(request, menu)
    offloads = (False, True) if request.cluster.device.has_own_memory else (False,)
    options += [{key: offloads} for key in ("cpu_offload", "activation_offload")]
    if own.checkpoint_of_block is None:
        kinds = [(kind, every) for kind in menu.activation_checkpoint for every in menu.activation_checkpoint_every]
        kinds = [(kind, every) for kind, every in kinds if kind != "none" or every == 1]
        options.append(
            {"activation_checkpoint": [k for k, _ in kinds], "activation_checkpoint_every": [e for _, e in kinds]}
        )
    else:
        yield _with_alike_blocks(own, menu)
    for option in options:
        table = vary(own, option)
        yield table.take(_differs(table, own))


def _with_alike_blocks(own: LayoutTable, menu: Menu) -> LayoutTable:
    """Return a layout that says what each block saves with all of them saving the same instead."""
    assert own.checkpoint_of_block is not None
    table = vary(own, {"activation_checkpoint": menu.activation_checkpoint})
    return replace(
        table,
        checkpoint_of_block=np.broadcast_to(
            table.activation_checkpoint[:, None], (len(table), own.checkpoint_of_block.shape[1])
        ),
    )


def _loss_choices(request: PlanRequest, menu: Menu) -> Iterator[Mapping[str, Any]]:
    """Yield the ways to hold fewer bytes of logits, which may cost no time."""
    if "loss_chunks" not in request.fixed:
        yield {"loss_chunks": (1, _FEW_CHUNKS, LOSS_CHUNKS)}
    if "compile_loss" not in request.fixed and menu.compile_loss:
        yield {"compile_loss": (False, True)}


def _differs(table: LayoutTable, own: LayoutTable) -> Bools:
    names = (
        "schedule",
        "stages_per_rank",
        "cpu_offload",
        "activation_offload",
        "loss_chunks",
        "compile",
        "compile_loss",
        "activation_checkpoint_every",
        *KEYS,
    )
    return np.asarray(np.any([getattr(table, name) != getattr(own, name)[0] for name in names], axis=0))


def changes(layout: Layout, other: Layout) -> dict[str, object]:
    """Return the keys of `other` that differ from those of `layout`, but for dp_shard where another degree changed."""
    found = {
        name: getattr(other, name) for name in Layout.model_fields if getattr(layout, name) != getattr(other, name)
    }
    found.pop("virtual_stages", None)
    if set(layout.activation_checkpoint_blocks or ()) == {other.activation_checkpoint}:
        found.pop(_BLOCKS, None)  # said of each block or of all, it is the same
    if layout.stages_per_rank != other.stages_per_rank:
        found["virtual_stages"] = other.stages_per_rank
    if len(found) > 1:
        found.pop("dp_shard", None)
    # What `layout` leaves to be chosen may be another choice with the degrees of `other`.
    left = other.replace(reshard_after_forward=layout.reshard_after_forward, gradient_sync=layout.gradient_sync)
    if "reshard_after_forward" in found:
        found["reshard_after_forward"] = "always" if other.is_resharded else "never"
        if left.is_resharded == other.is_resharded:
            del found["reshard_after_forward"]
    if "gradient_sync" in found:
        found["gradient_sync"] = gradient_sync(other)
        if left.reduces_each_microbatch == other.reduces_each_microbatch:
            del found["gradient_sync"]
    return found


def gradient_sync(layout: Layout) -> str:
    """Return when gradients are reduced, auto resolved."""
    return "microbatch" if layout.reduces_each_microbatch else "step"


def change_of(layout: Layout, key: str) -> str:
    """Return a layout's value of a table's column as a job would write it."""
    if key == "is_resharded":
        return listed({"reshard_after_forward": "always" if layout.is_resharded else "never"})
    if key == "reduces_each_microbatch":
        return listed({"gradient_sync": gradient_sync(layout)})
    return listed({key: getattr(layout, key)})


def listed(changed: Mapping[str, object]) -> str:
    """Return changed keys as a job would write them."""
    return ", ".join(
        f"{name} left out" if value is None else f"{name}={_text(value)}" for name, value in changed.items()
    )


def _excess(candidate: Candidate, usual: MemoryUse, request: PlanRequest) -> str:
    """Return how much is missing, and which class of tensors takes so much more than in the pick."""
    memory, usable_bytes = candidate.estimate.memory, request.cluster.device.usable_memory_bytes
    host = host_use(candidate.layout, request)
    if host is not None and candidate.headroom_bytes < 0 and candidate.is_limited_by_host(usable_bytes):
        missing = format_bytes(-candidate.headroom_bytes)
        return f"the host's memory cannot hold {' and '.join(host.kept)}: {missing} a rank are missing"
    more = {name: getattr(memory, name) - getattr(usual, name) for name in MemoryUse.model_fields}
    # A layout that is compared with itself breaks at what is largest.
    worst = max(more, key=lambda name: (more[name], getattr(memory, name)))
    taken = f"takes {format_bytes(getattr(memory, worst))} of {MEMORY_CLASSES[worst]}"
    taken += f", {format_bytes(memory.needed_bytes)} in all"
    if candidate.headroom_bytes >= 0:
        missing = format_bytes(request.margin_bytes - candidate.headroom_bytes)
        return f"{taken}: {missing} of planner.memory_margin are missing"
    return f"{taken}: {format_bytes(-candidate.headroom_bytes)} are missing"


def _text(value: object) -> str:
    return str(value) if isinstance(value, str) else shown_value(value)
