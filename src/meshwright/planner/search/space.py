"""The layouts of a request as one LayoutTable: ways to split over the ranks, times choices that do not change those.

Tables grow key by key, and what is not valid is dropped as soon as that is known, so that the millions of combinations
that mean nothing are never held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.layout_table import (
    ACTIVATION_CHECKPOINTS,
    ATTENTION_BACKENDS,
    CONTEXT_METHODS,
    Bools,
    LayoutTable,
    concatenate,
    layout_table,
)
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import MEMORY_KEYS, Menu, memory_options, pipeline_options
from meshwright.planner.search.rules import is_valid, runs_schedule, shares_batch, splits_model
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, Layout

_WORDS: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "activation_checkpoint": ACTIVATION_CHECKPOINTS,
    "cp_method": CONTEXT_METHODS,
    "attention_backend": ATTENTION_BACKENDS,
}

WAYS = ("activation_checkpoint", "is_resharded", "reduces_each_microbatch")
"""Choices that spend memory for time: what is recomputed, what is kept gathered, whether whole gradients add up."""

_TAKES_TURNS = {"GPipe": "1F1B", "LoopedBFS": "Interleaved1F1B"}
"""For schedules that run all forwards first, the one that runs a backward as soon as it can."""


def layout_space(request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return every valid layout of the menu."""
    table = with_memory_options(with_ways(splits(request, menu), menu), memory_options(menu))
    table = with_choices(table, request, menu)
    return with_fine_choices(table, request, menu)


def model_splits(request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return every way to share the model among the ranks, whatever the batch, each with one method of cp.

    Memory keys have the first value of the menu.
    """
    # What the menu has no choice of is as it is set.
    set_alone = (
        "prefetch",
        "reshard_after_forward",
        "attention_backend",
        "compile_loss",
        "compile_optimizer",
        "separate_reduce_group",
        "communication_sms",
        "cuda_graphs",
    )
    as_set = {key: request.fixed[key] for key in set_alone if key in request.fixed}
    as_set.setdefault("compile_loss", menu.compile_loss)
    table, num_devices = layout_table([Layout().replace(**as_set)]), request.num_devices
    table = with_memory_options(table, memory_options(menu)[:1])
    for axis in ("tp", "cp", "pp", "dp_shard"):
        table = vary(table, {axis: getattr(menu, axis)})
        table = table.take(num_devices % (table.pp * table.cp * table.tp * table.dp_shard) == 0)
    table = replace(table, dp_replicate=num_devices // (table.pp * table.cp * table.tp * table.dp_shard))
    table = table.take(np.isin(table.dp_replicate, menu.dp_replicate))
    table = vary(vary(table, {"etp": menu.etp}), {"ep": menu.ep})
    table = _with_cp_methods(table, menu)
    table = table.take(splits_model(table, request))
    # The method is chosen later; the partition is valid if any method allows it.
    degrees = np.stack([getattr(table, axis) for axis in ("tp", "cp", "pp", "dp_shard", "etp", "ep")])
    _, first = np.unique(degrees, axis=1, return_index=True)
    return table.take(np.sort(first))


def splits(request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return every way to share model and batch among the ranks, other choices being any."""
    table = vary(model_splits(request, menu), {"microbatch_size": menu.microbatch_size})
    return table.take(shares_batch(table, request))


def with_ways(table: LayoutTable, menu: Menu) -> LayoutTable:
    """Return each split with every way to spend memory for time."""
    for key in WAYS:
        table = vary(table, {key: getattr(menu, key)})
    return table


def with_memory_options(table: LayoutTable, options: Sequence[Mapping[str, Any]]) -> LayoutTable:
    """Return each layout once with each of `options`, values of the memory keys."""
    return vary(table, {key: [option[key] for option in options] for key in MEMORY_KEYS})


def with_choices(table: LayoutTable, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return the valid layouts of each split and way to spend memory with every pipeline and method of cp."""
    is_pipeline = table.pp > 1
    flat, piped = table.take(~is_pipeline), table.take(is_pipeline)
    # Without a pipeline all schedules are one.
    schedule = request.fixed.get("schedule", Layout().schedule)
    flat = vary(flat, {"schedule": (schedule,), "stages_per_rank": (_flat_stages(request),)})
    table = concatenate([flat, vary(piped, pipeline_options(menu.pipelines))])
    table = _with_compile(_with_cp_methods(table, menu), request, menu)
    table = vary(table, {"has_model_graph": menu.has_model_graph})
    # The first of the fine choices that a layout may have.
    table = vary(table, {"activation_checkpoint_every": menu.activation_checkpoint_every[:1]})
    table = vary(table, {"async_tp": menu.async_tp[:1]})
    table = table.take(is_valid(table, request))
    return table.take(~is_needless(table, request, menu))


def is_needless(table: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return which layouts run all forwards before all backwards where the schedule that takes turns can run.

    Both wait as long, and that one holds fewer microbatches. Nor does it matter how often a single microbatch's
    gradients are reduced, and which blocks beyond a stage's last are recomputed.
    """
    needless = reduces_needlessly(table, request, menu) | _recomputes_as_much(table, request, menu)
    needless |= _keeps_needlessly(table, menu)
    for schedule, other in _TAKES_TURNS.items():
        if other in {name for name, _ in menu.pipelines}:
            turned = replace(table, schedule=np.full(len(table), SCHEDULES.index(other)))
            is_pipeline = (table.pp > 1) & (table.schedule == SCHEDULES.index(schedule))
            needless |= is_pipeline & runs_schedule(turned, request)
    return needless


def reduces_needlessly(table: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return which layouts differ from the default of gradient_sync where nothing comes of it."""
    is_default = table.reduces_each_microbatch == table.reduces_each_by_default
    return np.asarray(reduces_alike(table, request) & ~is_default & (len(menu.reduces_each_microbatch) > 1))


def reduces_alike(table: LayoutTable, request: PlanRequest) -> Bools:
    """Return which layouts take as long with either value of gradient_sync.

    That is with one microbatch, and where nothing is sharded: whole gradients then add up either way.
    """
    num_microbatches = request.workload.global_batch_size // (table.dp * table.microbatch_size)
    return np.asarray((num_microbatches <= 1) | (table.fsdp == 1))


def _keeps_needlessly(table: LayoutTable, menu: Menu) -> Bools:
    """Return which layouts differ from the default of reshard_after_forward where nothing comes of it."""
    is_default = table.is_resharded == table.reshards_by_default
    return np.asarray(keeps_alike(table) & ~is_default & (len(menu.is_resharded) > 1))


def keeps_alike(table: LayoutTable) -> Bools:
    """Return which layouts take as long with either value of reshard_after_forward: nothing is sharded or offloaded.

    With offload even one rank copies what it frees from the host again.
    """
    return np.asarray((table.fsdp == 1) & (table.expert_dp_shard <= 1) & ~table.cpu_offload)


def with_fine_choices(table: LayoutTable, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return the valid layouts that differ from those of `table` in what changes time a little, themselves included."""
    for key in ("activation_checkpoint_every", "async_tp"):
        table = vary(table, {key: getattr(menu, key)})
    return table.take(is_valid(table, request) & ~_recomputes_as_much(table, request, menu))


def with_other_fine_choices(table: LayoutTable, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return the same without those whose fine choices are the first of the menu, which are the first to be priced."""
    table = with_fine_choices(table, request, menu)
    is_first = table.activation_checkpoint_every == menu.activation_checkpoint_every[0]
    return table.take(~(is_first & (table.async_tp == menu.async_tp[0])))


def _recomputes_as_much(table: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return which layouts recompute every n-th block of stages that have fewer: the first alone, as a lower n does."""
    num_blocks = sum(group.count for group in request.setup.model.groups[1:-1])
    stage_blocks = np.ceil(num_blocks / table.num_stages)
    has_choice = len(menu.activation_checkpoint_every) > 1
    every = table.activation_checkpoint_every
    return np.asarray((every > 1) & (every > stage_blocks) & has_choice)


def vary(table: LayoutTable, options: Mapping[str, Sequence[Any]]) -> LayoutTable:
    """Return each layout of `table` once with each option; an option is a value of every key in `options`."""
    count = len(next(iter(options.values())))
    columns = {}
    for name, column in table.columns().items():
        if name in options:
            codes = [_code(name, value) for value in options[name]]
            columns[name] = np.tile(np.array(codes, column.dtype), len(table))
        else:
            columns[name] = np.repeat(column, count, axis=0) if count != 1 else column
    return LayoutTable(**columns)


def _with_cp_methods(table: LayoutTable, menu: Menu) -> LayoutTable:
    """Return each layout with every method of context parallelism; once, where there is none."""
    alone = vary(table.take(table.cp == 1), {"cp_method": menu.cp_method[:1]})
    return concatenate([alone, vary(table.take(table.cp > 1), {"cp_method": menu.cp_method})])


def _with_compile(table: LayoutTable, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return each layout compiled, if the menu has that, but for split backwards where compiled blocks run them twice.

    Their order with whole backwards is then faster, and in the table unless the menu has only split backwards.
    """
    splits = table.splits_backward
    if len(menu.compile) == 1 or not splits.any() or not request.setup.stack.repeats_compiled_backward:
        return vary(table, {"compile": menu.compile[:1]})
    has_others = any(schedule not in SPLIT_BACKWARD_SCHEDULES for schedule, _ in menu.pipelines)
    whole = vary(table.take(~splits), {"compile": menu.compile[:1]})
    return concatenate([whole, vary(table.take(splits), {"compile": (False,) if has_others else menu.compile})])


def _flat_stages(request: PlanRequest) -> int:
    """Return the stages of a rank without a pipeline: one, or what is set, which is then found to be invalid."""
    number = request.fixed.get("virtual_stages")
    return 1 if number is None else int(number)


def _code(key: str, value: Any) -> Any:
    return _WORDS[key].index(value) if key in _WORDS else value
