"""Pricing for the planner: which layouts fit a device, and how long a step of each takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, concatenate, layout_table
from meshwright.cost.memory.footprint import (
    Footprint,
    footprint,
    footprint_of_rank,
    host_activation_bytes,
    memory_use,
    runs_at_limit,
)
from meshwright.cost.memory.host_memory import HOST_BYTES, host_headroom_bytes, host_update
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import ReplayInputs, with_bubbles
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.step.estimate import MemoryUse
from meshwright.units import format_bytes


@dataclass(frozen=True)
class Priced:
    """Layouts with their memory and step times, one element a layout."""

    layouts: LayoutTable
    memory: Footprint
    headroom_bytes: Floats
    """What the fullest rank can still take of its device or of its share of the host's memory, whichever has less, with
    cached blocks given back; negative where a layout does not fit."""
    step: StepTerms
    known: dict[int, Candidate] = field(default_factory=dict, repr=False, compare=False)
    """The candidates that were made of layouts, by position: to replay a pipeline takes much longer than to look."""
    replay_inputs: dict[int, ReplayInputs] = field(default_factory=dict, repr=False, compare=False)
    """What replays of pipelines need, by position, for those that were prepared."""

    def __len__(self) -> int:
        return len(self.layouts)

    @cached_property
    def total_s(self) -> Floats:
        """Return the step times, seconds."""
        return self.step.total_s

    @cached_property
    def by_time(self) -> Ints:
        """Return the positions of the layouts, fastest first; of equally fast ones the one that leaves more memory."""
        return np.lexsort((-self.headroom_bytes, self.total_s))

    def fastest(self, is_one: Bools) -> Ints:
        """Return the positions of the layouts that `is_one` of, fastest first."""
        return self.by_time[is_one[self.by_time]]

    def take(self, rows: Any) -> Priced:
        """Return the layouts at `rows` (positions or a mask)."""
        return Priced(
            self.layouts.take(rows), self.memory.take(rows), self.headroom_bytes[rows], _take(self.step, rows)
        )

    def memory_use(self, row: int) -> MemoryUse:
        """Return the memory of one layout's fullest rank by tensor class."""
        return memory_use(self.memory, row)


def price(layouts: LayoutTable, request: PlanRequest, *, only_fitting: bool = True) -> Priced:
    """Return the layouts priced; those that leave less than the margin are left out unless `only_fitting` is false."""
    memory, headroom = weigh(layouts, request, request.margin_bytes if only_fitting else None)
    if only_fitting:
        fits = headroom >= request.margin_bytes
        layouts, memory, headroom = layouts.take(fits), memory.take(fits), headroom[fits]
    return _timed_as_weighed(layouts, memory, headroom, request)


def price_leaner(layouts: LayoutTable, request: PlanRequest) -> Priced:
    """Return the layouts that fit, priced; one that fits with async_tp alone has it."""
    memory, headroom = weigh(layouts, request, request.margin_bytes)
    fits = headroom >= request.margin_bytes
    as_they_are = _timed_as_weighed(layouts.take(fits), memory.take(fits), headroom[fits], request)
    # What it joins with a reduce-scatter is recomputed, not kept.
    others = layouts.take(~fits & (layouts.tp > 1) & layouts.compile & ~layouts.async_tp)
    return join([as_they_are, price(replace(others, async_tp=np.ones(len(others), np.bool_)), request)])


def _timed_as_weighed(layouts: LayoutTable, memory: Footprint, headroom: Floats, request: PlanRequest) -> Priced:
    step = time_steps(layouts, request)
    return Priced(layouts, memory, headroom, with_bubbles(step, request.configs(layouts), request))


def time_steps(layouts: LayoutTable, request: PlanRequest) -> StepTerms:
    """Return the steps of the layouts, with bubbles of stages of equally many blocks."""
    if not len(layouts):
        return StepTerms(**{column.name: np.zeros(0) for column in fields(StepTerms)})
    return _timed(request.configs(layouts))


def steps_of_each_s(
    layouts: LayoutTable, requests: Sequence[PlanRequest], constants: Constants | None = None
) -> Floats:
    """Return the step times, seconds, shape (requests, layouts), of requests that differ in their clusters alone.

    A table of a few layouts takes as long as one of a thousand, so all requests are asked at once.
    """
    parts = [request.configs(layouts) for request in requests]
    firsts = np.cumsum([0, *(len(part.setups) for part in parts[:-1])])
    configs = Configurations(
        tuple(setup for part in parts for setup in part.setups),
        np.concatenate([part.setup_index + first for part, first in zip(parts, firsts, strict=True)]),
        concatenate([layouts] * len(parts)),
    )
    step = with_bubbles(_timed(configs, constants), configs, requests[0])
    return step.total_s.reshape(len(requests), len(layouts))


def _timed(configs: Configurations, constants: Constants | None = None) -> StepTerms:
    step = step_times(configs, constants)
    if not configs.layouts.cpu_offload.any():
        return step
    # The device waits while the host runs the optimizer, which takes the device no time then.
    return replace(
        step,
        cpu_bound_s=step.cpu_bound_s + host_update(configs).host_s,
        optimizer_s=np.where(configs.layouts.cpu_offload, 0.0, step.optimizer_s),
    )


def weigh(
    layouts: LayoutTable, request: PlanRequest, least_headroom_bytes: float | None = None
) -> tuple[Footprint, Floats]:
    """Return the memory of each layout's fullest rank, and what that can still take of its device or of its share of
    the host's memory, whichever has less, bytes.

    With `least_headroom_bytes`, the rank of a layout that leaves less may be another one that leaves less.
    """
    configs, usable_bytes = request.configs(_with_cuts(layouts, request)), request.cluster.device.usable_memory_bytes
    most_bytes = math.inf if least_headroom_bytes is None else usable_bytes - least_headroom_bytes
    memory = _with_room_for_cached(footprint(configs, most_bytes), usable_bytes)
    return memory, np.minimum(usable_bytes - memory.needed_bytes, _host_headroom_bytes(configs, request))


def memory_of_ranks(layout: Layout, request: PlanRequest) -> tuple[MemoryUse, ...]:
    """Return the memory of each pipeline rank of one layout; the fullest is what `price` says of it."""
    configs = request.configs(_with_cuts(layout_table([layout] * layout.pp), request))
    memory = footprint_of_rank(configs, np.arange(layout.pp))
    memory = _with_room_for_cached(memory, request.cluster.device.usable_memory_bytes)
    return tuple(memory_use(memory, rank) for rank in range(layout.pp))


def _with_room_for_cached(memory: Footprint, usable_bytes: float) -> Footprint:
    """Return the memory with no more cached blocks than a device has room for: it reserves no more than it has."""
    room_bytes = np.maximum(0.0, usable_bytes - memory.needed_bytes)
    return replace(memory, cached_bytes=np.minimum(memory.cached_bytes, room_bytes))


def is_tight(layout: Layout, request: PlanRequest) -> bool:
    """Return whether a layout needs more than its device has, and runs all the same: at the limit the allocator gives
    back what it caches, and its tensors fit.
    """
    configs = request.configs(_with_cuts(layout_table([layout] * layout.pp), request))
    memory = footprint_of_rank(configs, np.arange(layout.pp))
    is_over = bool((memory.needed_bytes > request.cluster.device.usable_memory_bytes).any())
    has_host_room = (_host_headroom_bytes(configs, request) >= 0).all()
    return is_over and bool(runs_at_limit(memory, configs).all() and has_host_room)


class HostUse(NamedTuple):
    """What one layout keeps in the host's memory."""

    needed_bytes: float
    """Of a rank."""
    usable_bytes: float
    """A rank's share: the host's memory by its devices."""
    kept: tuple[str, ...]
    """What waits there, with the key of the job that moves it."""

    @property
    def words(self) -> str:
        """Return what does not fit in the host's memory, and what makes it."""
        return (
            f"a rank needs {format_bytes(self.needed_bytes)} of the host's memory for {' and '.join(self.kept)}, and "
            f"its share of that is {format_bytes(self.usable_bytes)} (more devices keep less each, and fewer "
            "devices of a node have more each)"
        )


def host_use(layout: Layout, request: PlanRequest) -> HostUse | None:
    """Return what a layout keeps in the host's memory; None where that is nothing."""
    setup = request.setup
    keys = {
        "state (layout.cpu_offload)": layout.cpu_offload,
        "activations (layout.activation_offload)": layout.activation_offload,
        'the embedding (memory.embedding = "uvm")': setup.pools_embedding and not layout.cpu_offload,
        'optimizer state (memory.optimizer_state = "uvm")': setup.pools_optimizer_state and not layout.cpu_offload,
    }
    kept = tuple(words for words, is_there in keys.items() if is_there)
    if not kept:
        return None
    configs = request.configs(_with_cuts(layout_table([layout]), request))
    share_bytes = HOST_BYTES / request.cluster.devices_per_node
    return HostUse(share_bytes - float(_host_headroom_bytes(configs, request)[0]), share_bytes, kept)


def _host_headroom_bytes(configs: Configurations, request: PlanRequest) -> Floats:
    """Return what each layout leaves of the host's memory, for a rank; infinite where nothing of it is there."""
    is_managed = request.setup.pools_embedding or request.setup.pools_optimizer_state
    if not (is_managed or (configs.layouts.cpu_offload | configs.layouts.activation_offload).any()):
        return np.full(len(configs), np.inf)
    return host_headroom_bytes(configs, host_activation_bytes(configs))


def _with_cuts(layouts: LayoutTable, request: PlanRequest) -> LayoutTable:
    """Return the layouts with the stages' first blocks that the request fixes."""
    firsts = request.fixed.get("stage_boundaries")
    if not firsts or layouts.first_blocks is not None:
        return layouts
    return replace(layouts, first_blocks=np.tile(np.array(firsts, np.int64), (len(layouts), 1)))


def join(parts: list[Priced]) -> Priced:
    """Return the layouts of all `parts`, in order; what is known of the first ones stays known."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def joined(name: str) -> Any:
        tables = [getattr(part, name) for part in parts]
        names = [column.name for column in fields(tables[0])]
        return type(tables[0])(**{one: np.concatenate([getattr(table, one) for table in tables]) for one in names})

    headroom = np.concatenate([part.headroom_bytes for part in parts])
    layouts = concatenate([part.layouts for part in parts])
    return Priced(layouts, joined("memory"), headroom, joined("step"), dict(first.known), dict(first.replay_inputs))


def _take(table: Any, rows: Any) -> Any:
    return type(table)(**{column.name: getattr(table, column.name)[rows] for column in fields(table)})
