"""The layouts next to the pick that are not valid: the next degree of each axis that its model or batch refuses."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.layout_table import layout_table
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import divisors
from meshwright.planner.search.rules import is_valid
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.run.layout_plan import Rejection
from meshwright.units import counted

_DENSE_AXES = ("tp", "pp", "cp")


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
        problems.insert(0, _other_ranks(layout, request))
    if batch % per_pass:
        problems.append(
            f"a global batch of {batch} sequences does not divide by {layout.dp} data-parallel ranks x "
            f"layout.microbatch_size = {layout.microbatch_size}"
        )
    else:
        problems += schedule_problems(layout, batch // per_pass)
    return problems[0]


def _other_ranks(layout: Layout, request: PlanRequest) -> str:
    return f"{counted(layout.num_ranks, 'rank')} on {counted(request.num_devices, 'device')}: change a degree"


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
