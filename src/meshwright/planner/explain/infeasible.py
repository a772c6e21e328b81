"""Why there is no layout for a request or next to its pick: the rule that is broken, and what would have to change."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.hardware.catalogue import device_names, load_device
from meshwright.hardware.choice import named_cluster
from meshwright.planner.explain.layout_rules import invalid_reason, rules_broken_by, with_keys
from meshwright.planner.explain.managed_states import with_managed_states
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import leanest
from meshwright.planner.search.menu import Menu, divisors, memory_options, menu_of, without_memory_keys
from meshwright.planner.search.price import host_use, weigh
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import layout_space, model_splits, splits, with_memory_options
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.problem import Fix, Problem, nearest_first, shown_value
from meshwright.spec.run.layout_plan import Rejection
from meshwright.units import counted, format_bytes, format_count

_MAX_DEVICES = 2**17
_NUM_DEVICES_NAMED = 3
_NUM_SAMPLED = 50
_DENSE_AXES = ("tp", "pp", "cp")
_SHARE_RANKS = (*_DENSE_AXES, "dp_shard", "dp_replicate")
"""Axes whose degrees multiply to the number of ranks."""
_LAYOUT = "layout."
_QUOTED_KEY = re.compile(r"layout\.(\w+) = ")


def no_layout(request: PlanRequest, menu: Menu) -> InfeasibleLayout:
    """Return the error that says why none of the menu's layouts is valid and fits; what it suggests works."""
    if _has_layouts(request, menu):
        return InfeasibleLayout(_too_large(request, menu))
    problems = _problems(request, menu)
    working = (problem.working(lambda fix: _has_layouts_with(fix, request)) for problem in problems)
    problem = next((one for one in working if one.fixes), problems[0].working(lambda _: False))
    return InfeasibleLayout(f"{_asked(request)}: {problem}{_kept(request)}")


def _problems(request: PlanRequest, menu: Menu) -> list[Problem]:
    """Return the rules that keep the menu from holding a valid layout, the most probable first."""
    if len(candidates := splits(request, menu)):
        return _usual_problems(candidates, request, menu)
    if len(sharing := model_splits(request, menu)):
        return [_no_batch(request, np.unique(sharing.dp))]
    return _no_split(request)


def _has_layouts(request: PlanRequest, menu: Menu | None = None) -> bool:
    """Return whether any layout is valid, by default of the request's own menu, whether it fits or not."""
    menu = without_memory_keys(menu or menu_of(request))
    return len(layout_space(request, replace(menu, microbatch_size=menu.microbatch_size[:1]))) > 0


def _has_layouts_with(fix: Fix, request: PlanRequest) -> bool:
    changed = with_keys(request, fix)
    return changed is not None and _has_layouts(changed)


def _asked(request: PlanRequest) -> str:
    return f"{request.model_name} on {counted(request.num_devices, 'device')} of {request.cluster.name}"


def _kept(request: PlanRequest) -> str:
    """Return which keys were set, as a part of a sentence."""
    if not request.fixed:
        return ""
    return "; set by you: " + ", ".join(f"layout.{key} = {shown_value(value)}" for key, value in request.fixed.items())


def _usual_problems(candidates: LayoutTable, request: PlanRequest, menu: Menu) -> list[Problem]:
    """Return the rules that splits break with the choices that are set: those about set keys alone and common first."""
    has_stages = (candidates.pp > 1) | (request.fixed.get("virtual_stages") in (None, 1))
    candidates = candidates.take(has_stages) if has_stages.any() else candidates
    rows = np.linspace(0, len(candidates) - 1, _NUM_SAMPLED).astype(int)
    choices = {"schedule": menu.pipelines[0][0]} if menu.pipelines else {}
    choices |= {"reshard_after_forward": "auto", "gradient_sync": "auto", **request.fixed}
    layouts = [candidates.layout(row).replace(**choices) for row in dict.fromkeys(rows.tolist())]
    reasons = Counter(rules_broken_by(layout, request)[0] for layout in layouts)

    def num_not_set(problem: Problem) -> int:
        return len(set(_QUOTED_KEY.findall(problem.what)) - request.fixed.keys())

    return sorted((problem for problem, _ in reasons.most_common()), key=num_not_set)


def _no_batch(request: PlanRequest, degrees: np.ndarray) -> Problem:
    """Return that no data-parallel degree divides the batch, with the microbatches, degrees and batches that may."""
    batch, size = request.workload.global_batch_size, request.fixed.get("microbatch_size", 1)
    per_pass = [int(dp) * size for dp in degrees]
    below, above = max(batch // one * one for one in per_pass), min(-(-batch // one) * one for one in per_pass)
    choices = " or ".join(
        f"{number} sequences ({number * request.workload.seq_len:,} tokens)" for number in (below, above) if number
    )
    sizes = [n for n in divisors(batch) if any(batch % (int(dp) * n) == 0 for dp in degrees)]
    fixes: list[Fix] = [{f"{_LAYOUT}microbatch_size": n} for n in nearest_first(size, sizes)]
    # Other degrees leave other numbers of data-parallel ranks, or set them.
    set_by_user = [(axis, request.fixed[axis]) for axis in _SHARE_RANKS if axis in request.fixed]
    numbers = divisors(request.num_devices)
    fixes += [{f"{_LAYOUT}{axis}": n} for axis, degree in set_by_user for n in nearest_first(degree, numbers)]
    each = f" x layout.microbatch_size = {size}" if size > 1 else ""
    after = (
        f"set the global batch to {choices}, or change the number of devices (cluster.num_devices, or "
        "--cluster NAME:COUNT)"
    )
    return Problem(
        f"a global batch of {batch} sequences divides among no number of data-parallel ranks that the model leaves "
        f"({', '.join(map(str, degrees[:8]))}{', ...' if len(degrees) > 8 else ''}){each}",
        fixes,
        after=f", or {after.removeprefix('set ')}",
        otherwise=after,
    )


def _no_split(request: PlanRequest) -> list[Problem]:
    """Return the rules that the keys set by the user break, or that no degrees divide the number of devices."""
    fixed, count = request.fixed, request.num_devices
    degrees = {axis: int(fixed.get(axis, 1)) for axis in AXES}
    product = int(np.prod(list(degrees.values())))
    free = next((axis for axis in ("dp_shard", "dp_replicate", "cp", "pp", "tp") if axis not in fixed), None)

    def layout(rest: int) -> Layout:
        return Layout.model_validate({**degrees, **fixed, **({free: rest} if free else {})})

    def problems(rest: int) -> list[Problem]:
        return split_problems(layout(rest), request.architecture, request.workload.seq_len)

    others = [{one.what for one in problems(rest)} for rest in (2, 3)]
    alone = [one for one in problems(1) if all(one.what in found for found in others)]
    if alone:  # on any number of devices
        return alone
    if count % product:
        factors = " x ".join(f"layout.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1)
        nearest = " or ".join(map(str, request.cluster.nearest_multiples(product)))
        advice = "change a degree" + (f", or take {nearest} devices" if nearest else "")
        return [Problem(f"{counted(count, 'device')} do not divide by {factors}", otherwise=advice)]
    return rules_broken_by(layout(count // product), request)


def _too_large(request: PlanRequest, menu: Menu) -> str:
    """Return which class of tensors is too large, and the smallest cluster and the devices that would do."""
    offloaded = _offloaded(request, menu) if len(menu.cpu_offload) > 1 else ""
    leanest_ones = _leanest(request, menu, cpu_offload=menu.cpu_offload[0])
    memory, headroom = weigh(leanest_ones, request)
    row = int(headroom.argmax())
    usable = request.cluster.device.usable_memory_bytes
    is_host_full = headroom[row] < usable - memory.needed_bytes[row] - 1
    host = host_use(leanest_ones.layout(row), request) if is_host_full else None
    if host is not None:
        remedies = _remedies(request, float(usable - headroom[row]), is_host_full=True)
        return f"{_asked(request)} fits in no layout: with the leanest, {host.words}: {remedies}{_kept(request)}"
    parts = {name.removesuffix("_bytes"): float(values[row]) for name, values in vars(memory).items()}
    parts.pop("context")
    worst = max(parts, key=lambda name: parts[name])
    needed = format_bytes(usable - headroom[row])
    margin = f" less planner.memory_margin = {request.memory_margin:g} of it" if request.memory_margin else ""
    return (
        f"{_asked(request)} fits in no layout: the leanest needs {needed} on a device that can give "
        f"{format_bytes(usable)}{margin}, most of it {worst} ({format_bytes(parts[worst])}){offloaded}: "
        f"{_remedies(request, float(usable - headroom[row]))}{_kept(request)}"
    )


def _offloaded(request: PlanRequest, menu: Menu) -> str:
    """Return why it does not help that the state waits in the host's memory, as a part of a sentence."""
    memory, _ = weigh(_leanest(request, menu, cpu_offload=True), request)
    least_bytes = float(memory.needed_bytes.min())
    if least_bytes <= request.cluster.device.usable_memory_bytes - request.margin_bytes:
        return ", nor does the host's memory hold its state"
    return f", and {format_bytes(least_bytes)} with its state in the host's memory (layout.cpu_offload = true)"


def _leanest(request: PlanRequest, menu: Menu, **changes: Any) -> LayoutTable:
    """Return each split with what needs least memory of the device, but for `changes` of memory keys."""
    option = memory_options(menu)[-1] | changes
    return leanest(with_memory_options(splits(request, menu), [option]), menu)


def _remedies(request: PlanRequest, needed_bytes: float, *, is_host_full: bool = False) -> str:
    """Return what would make a layout fit, actions first; larger devices have no larger host."""
    found, after = [], ""
    spare = 1 - needed_bytes / request.cluster.device.usable_memory_bytes
    if spare >= 0:
        found.append(f"set planner.memory_margin to {math.floor(100 * spare) / 100:g} or less")
    found += [f"set {key} to {shown_value(value)}" for key, value in _other_pools(request)]
    free = replace(request, fixed={})
    if request.fixed and _fits(free):
        found.append("leave out what is set in [layout]")
    if request.cluster.inter_node is None:
        found.append("take a cluster whose nodes a network joins")
    elif count := _smallest_count(request):
        found.append(f"take {count} devices")
    else:
        after = f"no number of these devices up to {format_count(_MAX_DEVICES)} would do"
    if not is_host_full and (devices := _larger_devices(needed_bytes, request)):
        found.append(f"{'or' if found else 'take'} as many devices with more memory ({', '.join(devices)})")
    return "; ".join(part for part in (", ".join(found), after) if part)


def _other_pools(request: PlanRequest) -> Iterator[tuple[str, str]]:
    """Yield the keys of [memory] and the values with which a layout fits."""
    managed = with_managed_states(request)
    if managed is not None and _has_layouts(managed) and _fits(managed):
        yield "memory.optimizer_state", "uvm"
    # State that waits in the host's memory goes with none of these.
    for key in ("embedding", "optimizer_state"):
        if getattr(request.setup.memory, key) == "uvm":
            usual = request.with_setup(memory=request.setup.memory.replace(**{key: "device"}))
            if _fits(usual):
                yield f"memory.{key}", "device"


def _smallest_count(request: PlanRequest) -> int | None:
    """Return the smallest doubling of the number of devices, or of a node's, on which the model fits."""
    cluster, own = request.cluster, request.num_devices
    counts = {n << power for power in range(_MAX_DEVICES.bit_length()) for n in (own, cluster.devices_per_node)}
    for count in sorted(n for n in counts if own < n <= _MAX_DEVICES and cluster.takes(n)):
        if _fits(request.with_setup(cluster=cluster.with_num_devices(count))):
            return count
    return None


def _fits(request: PlanRequest) -> bool:
    """Return whether a layout fits, with memory keys where they are needed and left open."""
    menu = menu_of(request)
    tables = (_leanest(request, menu, **option) for option in memory_options(menu))
    return any(bool((weigh(table, request)[1] >= request.margin_bytes).any()) for table in tables)


def _larger_devices(needed_bytes: float, request: PlanRequest) -> list[str]:
    """Return the names of the smallest devices of the catalogue that hold `needed_bytes`, of those that `--cluster
    NAME:COUNT` takes.
    """
    devices = [load_device(name) for name in device_names() if name != request.cluster.device.name]
    least_bytes = needed_bytes / (1 - request.memory_margin)
    enough = [device for device in devices if device.usable_memory_bytes >= least_bytes and device.has_own_memory]
    enough.sort(key=lambda device: device.memory_bytes.value)
    available = islice((one for one in enough if _is_available(one.name, request.num_devices)), _NUM_DEVICES_NAMED)
    return [f"{device.name}, {format_bytes(device.memory_bytes.value)}" for device in available]


def _is_available(device: str, num_devices: int) -> bool:
    """Return whether a cluster is usual for the device and takes so many of them."""
    try:
        return named_cluster(device, num_devices).takes(num_devices)
    except ConfigError:
        return False


def invalid_neighbours(layout: Layout, request: PlanRequest) -> Iterator[Rejection]:
    """Yield, for each axis whose next larger degree cannot be, that degree and the rule."""
    is_mixture = isinstance(request.architecture, MoEArchitecture)
    for axis in (*_DENSE_AXES, *(("ep",) if is_mixture else ())):
        if axis in request.fixed or (other := _next(layout, axis, request.num_devices)) is None:
            continue
        change = f"{axis}={getattr(other, axis)}"
        if not is_valid(layout_table([other]), request)[0]:
            yield Rejection(change=change, reason=invalid_reason(other, request))
        elif axis == "tp" and other.tp > request.cluster.domain_size:
            domain = request.cluster.domain_size
            reason = f"reaches beyond the {domain} devices that {_link(request)} joins, which never pays: not searched"
            yield Rejection(change=change, reason=reason)


def _next(layout: Layout, axis: str, num_devices: int) -> Layout | None:
    """Return the layout with the next larger degree of `axis`, its ranks taken from dp_shard if that divides."""
    own = getattr(layout, axis)
    larger = next((n for n in divisors(num_devices) if n > own), None)
    if larger is None:
        return None
    if axis == "ep":
        return layout.replace(ep=larger)
    ranks = layout.dp_replicate * layout.dp_shard * own
    if ranks % larger:
        return None
    return layout.replace(**{axis: larger, "dp_replicate": 1, "dp_shard": ranks // larger})


def _link(request: PlanRequest) -> str:
    link = request.cluster.intra_node
    return "one node" if link is None else link.name
