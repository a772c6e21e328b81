"""The frontier of time and money: the same run on fewer devices and on more, each with its own best layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.planner.budget.budget import Run, budget
from meshwright.planner.plan import find
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import finalists
from meshwright.planner.search.simplicity import simplest
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.run.budget import Budget, Reliability
from meshwright.spec.run.plan import Candidate

_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)


def frontier(
    request: PlanRequest, clusters: Iterable[tuple[Cluster, float | None]], run: Run, reliability: Reliability
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
