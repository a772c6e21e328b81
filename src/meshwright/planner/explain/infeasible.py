"""Why there is no layout for a request or next to its pick: the rule that is broken, and what would have to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.errors import InfeasibleLayout
from meshwright.hardware.catalogue import device_names, load_device
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import leanest
from meshwright.planner.search.menu import Menu, divisors, menu_of
from meshwright.planner.search.price import weigh
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import layout_space, model_splits, splits
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.run.layout_plan import Rejection
from meshwright.units import counted, format_bytes, format_count

_MAX_DEVICES = 2**17
_NUM_DEVICES_NAMED = 3
_NUM_SAMPLED = 50
_DENSE_AXES = ("tp", "pp", "cp")


def no_layout(request: PlanRequest, menu: Menu) -> InfeasibleLayout:
    """Return the error that says why none of the menu's layouts is valid and fits."""
    candidates = splits(request, menu)
    if len(candidates) and len(layout_space(request, replace(menu, microbatch_size=menu.microbatch_size[:1]))):
        return InfeasibleLayout(_too_large(request, menu))
    if len(candidates):
        return InfeasibleLayout(f"{_asked(request)}: {_usual_reason(candidates, request)}{_kept(request)}")
    if len(sharing := model_splits(request, menu)):
        return InfeasibleLayout(_no_batch(request, np.unique(sharing.dp)))
    return InfeasibleLayout(_no_split(request))


def _asked(request: PlanRequest) -> str:
    return f"{request.model_name} on {counted(request.num_devices, 'device')} of {request.cluster.name}"


def _kept(request: PlanRequest) -> str:
    """Return which keys were set, as a part of a sentence."""
    if not request.fixed:
        return ""
    return "; set by you: " + ", ".join(f"layout.{key} = {value}" for key, value in request.fixed.items())


def _usual_reason(candidates: LayoutTable, request: PlanRequest) -> str:
    """Return the rule that most of the splits break with the choices that are set."""
    rows = np.linspace(0, len(candidates) - 1, _NUM_SAMPLED).astype(int)
    layouts = [candidates.layout(row).replace(**request.fixed) for row in dict.fromkeys(rows.tolist())]
    reasons = Counter(invalid_reason(layout, request) for layout in layouts)
    return reasons.most_common(1)[0][0]


def _no_batch(request: PlanRequest, degrees: np.ndarray) -> str:
    """Return that no data-parallel degree divides the batch, and the nearest batches that one does."""
    batch = request.workload.global_batch_size
    below = [batch // int(dp) * int(dp) for dp in degrees if batch >= dp]
    above = [-(-batch // int(dp)) * int(dp) for dp in degrees]
    nearest = [*([max(below)] if below else []), min(above)]
    choices = " or ".join(f"{size} ({size * request.workload.seq_len} tokens)" for size in dict.fromkeys(nearest))
    return (
        f"{_asked(request)}: a global batch of {batch} sequences divides among no number of data-parallel ranks that "
        f"the model leaves ({', '.join(map(str, degrees[:8]))}{', ...' if len(degrees) > 8 else ''}): "
        f"set the global batch to {choices} sequences, or change the number of devices (cluster.num_devices, or "
        f"--cluster NAME:COUNT){_kept(request)}"
    )


def _no_split(request: PlanRequest) -> str:
    """Return the rule that the keys set by the user violate, or that no degrees divide the number of devices."""
    degrees = {axis: int(request.fixed.get(axis, 1)) for axis in AXES}
    product, count = int(np.prod(list(degrees.values()))), request.num_devices
    keys = {key: value for key, value in request.fixed.items() if key in Layout.model_fields and key not in AXES}
    alone = split_problems(Layout.model_validate(degrees | keys), request.architecture, request.workload.seq_len)
    if alone:  # on any number of devices
        return f"{_asked(request)}: {alone[0]}{_kept(request)}"
    if count % product:
        factors = " x ".join(f"layout.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1)
        nearest = " or ".join(map(str, request.cluster.nearest_multiples(product)))
        advice = "change a degree" + (f", or take {nearest} devices" if nearest else "")
        return f"{_asked(request)}: {counted(count, 'device')} do not divide by {factors}: {advice}"
    rest = count // product
    free = next((axis for axis in ("dp_shard", "dp_replicate", "cp", "pp", "tp") if axis not in request.fixed), None)
    if free is not None:
        degrees[free] *= rest
    layout = Layout.model_validate(degrees | keys)
    return f"{_asked(request)}: {invalid_reason(layout, request)}{_kept(request)}"


def _too_large(request: PlanRequest, menu: Menu) -> str:
    """Return which class of tensors is too large, and the smallest cluster and the devices that would do."""
    is_tried = "cpu_offload" not in request.fixed and all(menu.cpu_offload)
    offloaded = _offloaded(request, menu) if is_tried else ""
    menu = replace(menu, cpu_offload=(False,)) if is_tried else menu
    memory, headroom = weigh(leanest(splits(request, menu), menu), request)
    row = int(headroom.argmax())
    parts = {name.removesuffix("_bytes"): float(values[row]) for name, values in vars(memory).items()}
    parts.pop("context")
    worst = max(parts, key=lambda name: parts[name])
    usable = request.cluster.device.usable_memory_bytes
    needed = format_bytes(usable - headroom[row])
    margin = f" less planner.memory_margin = {request.memory_margin:g} of it" if request.memory_margin else ""
    return (
        f"{_asked(request)} fits in no layout: the leanest needs {needed} on a device that can give "
        f"{format_bytes(usable)}{margin}, most of it {worst} ({format_bytes(parts[worst])}){offloaded}: "
        f"{_remedies(request, float(usable - headroom[row]))}{_kept(request)}"
    )


def _offloaded(request: PlanRequest, menu: Menu) -> str:
    """Return why it does not help that the state waits in the host's memory, as a part of a sentence."""
    memory, _ = weigh(leanest(splits(request, menu), menu), request)
    least_bytes = float(memory.reserved_bytes.min())
    if least_bytes <= request.cluster.device.usable_memory_bytes - request.margin_bytes:
        return ", nor does the host's memory hold its state"
    return f", and {format_bytes(least_bytes)} with its state in the host's memory (layout.cpu_offload = true)"


def _remedies(request: PlanRequest, needed_bytes: float) -> str:
    found = []
    spare = 1 - needed_bytes / request.cluster.device.usable_memory_bytes
    if spare >= 0:
        found.append(f"set planner.memory_margin to {math.floor(100 * spare) / 100:g} or less")
    free = replace(request, fixed={})
    if request.fixed and (_fits(free) or (request.cluster.device.can_offload and _fits(free, offloads=True))):
        found.append("leave out what is set in [layout]")
    if request.cluster.inter_node is None:
        found.append("take a cluster whose nodes a network joins")
    elif count := _smallest_count(request):
        found.append(f"take {count} devices")
    else:
        found.append(f"no number of these devices up to {format_count(_MAX_DEVICES)} would do")
    if devices := _larger_devices(needed_bytes, request):
        found.append(f"or as many devices with more memory ({', '.join(devices)})")
    return ", ".join(found)


def _smallest_count(request: PlanRequest) -> int | None:
    """Return the smallest doubling of the number of devices that the cluster takes and on which the model fits."""
    count = 2 * request.num_devices
    while count <= _MAX_DEVICES:
        if request.cluster.takes(count):
            larger = request.with_setup(cluster=request.cluster.with_num_devices(count))
            if _fits(larger):
                return count
        count *= 2
    return None


def _fits(request: PlanRequest, *, offloads: bool = False) -> bool:
    menu = menu_of(request)
    menu = replace(menu, cpu_offload=(True,)) if offloads else menu
    _, headroom = weigh(leanest(splits(request, menu), menu), request)
    return bool((headroom >= request.margin_bytes).any())


def _larger_devices(needed_bytes: float, request: PlanRequest) -> list[str]:
    """Return the names of the smallest devices of the catalogue that hold `needed_bytes`."""
    devices = [load_device(name) for name in device_names() if name != request.cluster.device.name]
    least_bytes = needed_bytes / (1 - request.memory_margin)
    enough = [device for device in devices if device.usable_memory_bytes >= least_bytes and device.is_accelerator]
    enough.sort(key=lambda device: device.memory_bytes.value)
    return [f"{device.name}, {format_bytes(device.memory_bytes.value)}" for device in enough[:_NUM_DEVICES_NAMED]]


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


def invalid_reason(layout: Layout, request: PlanRequest) -> str:
    """Return the first rule that an invalid layout breaks."""
    problems: list[str] = [*split_problems(layout, request.architecture, request.workload.seq_len)]
    batch, per_pass = request.workload.global_batch_size, layout.dp * layout.microbatch_size
    if layout.num_ranks != request.num_devices:
        ranks, devices = counted(layout.num_ranks, "rank"), counted(request.num_devices, "device")
        problems.insert(0, f"{ranks} on {devices}: change a degree")
    if batch % per_pass:
        problems.append(
            f"a global batch of {batch} sequences does not divide by {layout.dp} data-parallel ranks x "
            f"layout.microbatch_size = {layout.microbatch_size}"
        )
    else:
        problems += schedule_problems(layout, batch // per_pass)
    return problems[0]


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
