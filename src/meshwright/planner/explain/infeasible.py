"""Why there is no layout for a question, and what would have to change."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from meshwright.cost.layout_table import LayoutTable
from meshwright.errors import InfeasibleLayout
from meshwright.hardware.catalogue import device_names, load_device
from meshwright.planner.explain.refused import invalid_reason
from meshwright.planner.question import Question
from meshwright.planner.search.bounds import leanest
from meshwright.planner.search.menu import Menu, menu_of
from meshwright.planner.search.price import weigh
from meshwright.planner.search.space import layout_space, model_splits, splits
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.units import counted, format_bytes, format_count

_MAX_DEVICES = 2**17
_NUM_DEVICES_NAMED = 3
_NUM_SAMPLED = 50


def no_layout(question: Question, menu: Menu) -> InfeasibleLayout:
    """Return the error that says why none of the menu's layouts is valid and fits."""
    candidates = splits(question, menu)
    if len(candidates) and len(layout_space(question, replace(menu, microbatch_size=menu.microbatch_size[:1]))):
        return InfeasibleLayout(_too_large(question, menu))
    if len(candidates):
        return InfeasibleLayout(f"{_asked(question)}: {_usual_reason(candidates, question)}{_kept(question)}")
    if len(sharing := model_splits(question, menu)):
        return InfeasibleLayout(_no_batch(question, np.unique(sharing.dp)))
    return InfeasibleLayout(_no_split(question))


def _asked(question: Question) -> str:
    return f"{question.model_name} on {counted(question.num_devices, 'device')} of {question.cluster.name}"


def _kept(question: Question) -> str:
    """Return which keys were set, as a part of a sentence."""
    if not question.fixed:
        return ""
    return "; set by you: " + ", ".join(f"layout.{key} = {value}" for key, value in question.fixed.items())


def _usual_reason(candidates: LayoutTable, question: Question) -> str:
    """Return the rule that most of the splits break with the choices that are set."""
    rows = np.linspace(0, len(candidates) - 1, _NUM_SAMPLED).astype(int)
    layouts = [candidates.layout(row).replace(**question.fixed) for row in dict.fromkeys(rows.tolist())]
    reasons = Counter(invalid_reason(layout, question) for layout in layouts)
    return reasons.most_common(1)[0][0]


def _no_batch(question: Question, degrees: np.ndarray) -> str:
    """Return that no data-parallel degree divides the batch, and the nearest batches that one does."""
    batch = question.workload.global_batch_size
    below = [batch // int(dp) * int(dp) for dp in degrees if batch >= dp]
    above = [-(-batch // int(dp)) * int(dp) for dp in degrees]
    nearest = [*([max(below)] if below else []), min(above)]
    choices = " or ".join(f"{size} ({size * question.workload.seq_len} tokens)" for size in dict.fromkeys(nearest))
    return (
        f"{_asked(question)}: a global batch of {batch} sequences divides among no number of data-parallel ranks that "
        f"the model leaves ({', '.join(map(str, degrees[:8]))}{', ...' if len(degrees) > 8 else ''}): "
        f"set the global batch to {choices} sequences, or change the number of devices{_kept(question)}"
    )


def _no_split(question: Question) -> str:
    """Return the rule that the keys set by the user violate, or that no degrees divide the number of devices."""
    degrees = {axis: int(question.fixed.get(axis, 1)) for axis in AXES}
    product, count = int(np.prod(list(degrees.values()))), question.num_devices
    if count % product:
        factors = " x ".join(f"layout.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1)
        nearest = " or ".join(map(str, question.cluster.nearest_multiples(product)))
        advice = "change a degree" + (f", or take {nearest} devices" if nearest else "")
        return f"{_asked(question)}: {counted(count, 'device')} do not divide by {factors}: {advice}"
    rest = count // product
    free = next((axis for axis in ("dp_shard", "dp_replicate", "cp", "pp", "tp") if axis not in question.fixed), None)
    if free is not None:
        degrees[free] *= rest
    keys = {key: value for key, value in question.fixed.items() if key in Layout.model_fields and key not in AXES}
    layout = Layout.model_validate(degrees | keys)
    return f"{_asked(question)}: {invalid_reason(layout, question)}{_kept(question)}"


def _too_large(question: Question, menu: Menu) -> str:
    """Return which class of tensors is too large, and the smallest cluster and the devices that would do."""
    is_tried = "cpu_offload" not in question.fixed and all(menu.cpu_offload)
    offloaded = _offloaded(question, menu) if is_tried else ""
    menu = replace(menu, cpu_offload=(False,)) if is_tried else menu
    memory, headroom = weigh(leanest(splits(question, menu), menu), question)
    row = int(headroom.argmax())
    parts = {name.removesuffix("_bytes"): float(values[row]) for name, values in vars(memory).items()}
    parts.pop("context")
    worst = max(parts, key=lambda name: parts[name])
    usable = question.cluster.device.usable_memory_bytes
    needed = format_bytes(usable - headroom[row])
    margin = f" less planner.memory_margin = {question.memory_margin:g} of it" if question.memory_margin else ""
    return (
        f"{_asked(question)} fits in no layout: the leanest needs {needed} on a device that can give "
        f"{format_bytes(usable)}{margin}, most of it {worst} ({format_bytes(parts[worst])}){offloaded}: "
        f"{_remedies(question, float(usable - headroom[row]))}{_kept(question)}"
    )


def _offloaded(question: Question, menu: Menu) -> str:
    """Return why it does not help that the state waits in the host's memory, as a part of a sentence."""
    memory, _ = weigh(leanest(splits(question, menu), menu), question)
    least_bytes = float(memory.reserved_bytes.min())
    if least_bytes <= question.cluster.device.usable_memory_bytes - question.margin_bytes:
        return ", nor does the host's memory hold its state"
    return f", and {format_bytes(least_bytes)} with its state in the host's memory (layout.cpu_offload = true)"


def _remedies(question: Question, needed_bytes: float) -> str:
    found = []
    spare = 1 - needed_bytes / question.cluster.device.usable_memory_bytes
    if spare >= 0:
        found.append(f"set planner.memory_margin to {math.floor(100 * spare) / 100:g} or less")
    free = replace(question, fixed={})
    if question.fixed and (_fits(free) or (not question.cluster.device.is_host and _fits(free, offloads=True))):
        found.append("leave out what is set in [layout]")
    if question.cluster.inter_node is None:
        found.append("take a cluster whose nodes a network joins")
    elif count := _smallest_count(question):
        found.append(f"take {count} devices")
    else:
        found.append(f"no number of these devices up to {format_count(_MAX_DEVICES)} would do")
    if devices := _larger_devices(needed_bytes, question):
        found.append(f"or as many devices with more memory ({', '.join(devices)})")
    return ", ".join(found)


def _smallest_count(question: Question) -> int | None:
    """Return the smallest doubling of the number of devices that the cluster takes and on which the model fits."""
    count = 2 * question.num_devices
    while count <= _MAX_DEVICES:
        if question.cluster.takes(count):
            larger = question.with_setting(cluster=question.cluster.with_num_devices(count))
            if _fits(larger):
                return count
        count *= 2
    return None


def _fits(question: Question, *, offloads: bool = False) -> bool:
    menu = menu_of(question)
    menu = replace(menu, cpu_offload=(True,)) if offloads else menu
    _, headroom = weigh(leanest(splits(question, menu), menu), question)
    return bool((headroom >= question.margin_bytes).any())


def _larger_devices(needed_bytes: float, question: Question) -> list[str]:
    """Return the names of the smallest devices of the catalogue that hold `needed_bytes`."""
    devices = [load_device(name) for name in device_names() if name != question.cluster.device.name]
    least_bytes = needed_bytes / (1 - question.memory_margin)
    enough = [device for device in devices if device.usable_memory_bytes >= least_bytes and not device.is_host]
    enough.sort(key=lambda device: device.memory_bytes.value)
    return [f"{device.name}, {format_bytes(device.memory_bytes.value)}" for device in enough[:_NUM_DEVICES_NAMED]]
