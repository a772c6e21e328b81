"""budget and frontier: days and cost of a run, with failures, checkpoints and restarts, on a cluster and its sizes.

    M        = 1 / (devices x failures of a device)                                  mean time between endings
    interval = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d                      d: seconds of a checkpoint
    wall     = work x M / interval x exp(R / M) x (exp((interval + d) / M) - 1)      R: seconds of a restart

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equations 20
and 37; the first factor of the interval is Young's of 1974. Ignored: failures that come together, devices that are slow
rather than dead, and checkpoints that are written while training goes on, with which more is reached.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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


def budget(run: BudgetRequest, cluster: Cluster, candidate: Candidate, reliability: Reliability) -> Budget:
    """Return what a run takes on a cluster with a layout."""
    step_s = candidate.step_s
    num_steps = math.ceil(run.num_tokens / run.workload.global_batch_tokens)
    written_bytes = run.num_parameters * reliability.checkpoint_bytes_per_parameter
    checkpoint_s = written_bytes / (reliability.checkpoint_bytes_per_s_per_node * cluster.num_nodes)
    mtbf_s = mean_time_between_failures_s(cluster.num_devices, reliability)
    interval_s = best_interval_s(checkpoint_s, mtbf_s) if mtbf_s else None
    share = goodput(checkpoint_s, mtbf_s, interval_s, reliability.restart_s) if mtbf_s and interval_s else 1.0
    wall_s = num_steps * step_s / share
    device_hours = wall_s / _HOUR_S * cluster.num_devices
    return Budget(
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        layout=candidate.layout,
        step_s=step_s,
        num_steps=num_steps,
        mtbf_s=mtbf_s,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=interval_s,
        goodput=share,
        days=wall_s / _DAY_S,
        device_hours=device_hours,
        cost=None if run.price_per_device_hour is None else device_hours * run.price_per_device_hour,
        is_deadline_satisfied=None if run.deadline_s is None else wall_s <= run.deadline_s,
        relative_error=candidate.estimate.relative_error,
    )


def mean_time_between_failures_s(num_devices: int, reliability: Reliability) -> float | None:
    """Return the seconds between two endings of a job on `num_devices`; None where nothing fails."""
    per_day = num_devices * reliability.failures_per_device_day
    mtbf_s = _DAY_S / per_day if per_day else math.inf
    return mtbf_s if math.isfinite(mtbf_s) else None


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose least."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    interval_s = math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    # A checkpoint that costs nothing would be written all the time.
    return max(interval_s, 1.0)


def goodput(checkpoint_s: float, mtbf_s: float, interval_s: float, restart_s: float) -> float:
    """Return the share of the time in which lasting steps are made; tiny where more fails than is done."""
    # Beyond a few hundred the exponential is as good as infinite.
    restarts, retries = (min(value / mtbf_s, 300.0) for value in (restart_s, interval_s + checkpoint_s))
    return min(1.0, interval_s / (mtbf_s * math.exp(restarts) * math.expm1(retries)))


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
