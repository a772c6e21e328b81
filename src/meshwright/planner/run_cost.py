"""budget and frontier: days and cost of a run, with failures, checkpoints and restarts, on a cluster and its sizes.

The formula, its sources and what it ignores are in cost/expected_goodput.py. A restart's seconds hold the detection of
the failure; a checkpoint keeps training waiting until it is written, which one in the background does not.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.cost.chosen_interval import ChosenInterval
from meshwright.cost.expected_goodput import (
    FailureModel,
    best_interval_s,
    expected_time,
    mean_time_between_failures_s,
)
from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.planner.plan import find
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import finalists, simplest
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.run.layout_plan import Budget, Candidate, Reliability
from meshwright.spec.step.workload import Workload

_DAY_S = 86_400.0
_HOUR_S = 3_600.0
_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
"""Sizes of a cluster on its frontier of days and cost, as multiples of its own."""


@dataclass(frozen=True)
class BudgetRequest:
    """What is to be trained, and for what price."""

    num_tokens: int
    num_parameters: int
    workload: Workload
    price_per_device_hour: float | None = None
    deadline_s: float | None = None


def checkpoint_s(num_parameters: int, cluster: Cluster, reliability: Reliability) -> float:
    """Return the seconds that writing a checkpoint takes."""
    written_bytes = num_parameters * reliability.checkpoint_bytes_per_parameter
    return written_bytes / (reliability.checkpoint_bytes_per_s_per_node * cluster.num_nodes)


def predicted_interval(request: PlanRequest, step_s: float, failures_per_device_day: float) -> ChosenInterval:
    """Return what checkpoint.interval = "auto" is expected to come to, for a predicted step, seconds.

    The run itself chooses by what it measures.
    """
    return ChosenInterval.of(
        step_s,
        checkpoint_s(request.setup.model.num_parameters, request.cluster, Reliability()),
        num_devices=request.cluster.num_devices,
        failures_per_device_day=failures_per_device_day,
    )


def budget(run: BudgetRequest, cluster: Cluster, candidate: Candidate, reliability: Reliability) -> Budget:
    """Return what a run takes on a cluster with a layout."""
    step_s = candidate.step_s
    num_steps = math.ceil(run.num_tokens / run.workload.global_batch_tokens)
    stall_s = checkpoint_s(run.num_parameters, cluster, reliability)
    mtbf_s = mean_time_between_failures_s(cluster.num_devices, reliability.failures_per_device_day)
    interval_s, share = None, 1.0
    if math.isfinite(mtbf_s):
        interval_s = best_interval_s(stall_s, mtbf_s)
        share = expected_time(FailureModel(mtbf_s, interval_s, stall_s, reliability.restart_s)).share
    wall_s = num_steps * step_s / share
    device_hours = wall_s / _HOUR_S * cluster.num_devices
    return Budget(
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        layout=candidate.layout,
        step_s=step_s,
        num_steps=num_steps,
        mtbf_s=mtbf_s if math.isfinite(mtbf_s) else None,
        checkpoint_s=stall_s,
        checkpoint_interval_s=interval_s,
        goodput=share,
        days=wall_s / _DAY_S,
        device_hours=device_hours,
        cost=None if run.price_per_device_hour is None else device_hours * run.price_per_device_hour,
        is_deadline_satisfied=None if run.deadline_s is None else wall_s <= run.deadline_s,
        relative_error=candidate.estimate.relative_error,
    )


def frontier(
    request: PlanRequest, clusters: Iterable[tuple[Cluster, float | None]], run: BudgetRequest, reliability: Reliability
) -> list[Budget]:
    """Return budgets on several sizes of each of `clusters` (with its price), slowest first, the cheapest of equals.

    Sizes on which nothing fits are left out.
    """
    found = []
    for cluster, price in clusters:
        for sized in _sizes(cluster):
            best = _best(request.with_setup(cluster=sized))
            if best is not None:
                found.append(budget(replace(run, price_per_device_hour=price), sized, best, reliability))
    return sorted(found, key=lambda point: (-point.days, point.device_hours))


def _sizes(cluster: Cluster) -> Iterator[Cluster]:
    for factor in _FACTORS:
        count = int(cluster.num_devices * factor)
        if count < 1:
            continue
        try:
            yield cluster.with_num_devices(count)
        except ConfigError:
            continue  # no whole number of nodes, or more than one without a network


def _best(request: PlanRequest) -> Candidate | None:
    try:
        priced = find(request, min_scored=0).priced
        best = finalists(priced, request)
        return simplest(priced, best, best[0].candidate, request)
    except InfeasibleLayout:
        return None
