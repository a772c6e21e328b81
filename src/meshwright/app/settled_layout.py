"""settle(): the layout of a job that leaves it open, or what its blocks save, chosen once before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from meshwright.app.recompute_budget import settle_checkpoints
from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.run.run import Manifest
from meshwright.spec.step.estimate import Estimate


class SettledLayout(NamedTuple):
    """What replaces what a job leaves open."""

    layout: Layout
    estimate: Estimate | None = None
    """What the planner expects of it; None where a run that is resumed has none."""

    def resolve(self, resolved: ResolvedJob) -> ResolvedJob:
        """Return the job with the layout set."""
        layout = LayoutRequest.model_validate(self.layout.model_dump())
        return replace(resolved, job=resolved.job.replace(layout=layout))


def plan_layout(resolved: ResolvedJob, num_ranks: int | None, resumed: Manifest | None) -> SettledLayout:
    """Return the layout of a job that searches for one: that of the run which is resumed, or else the planner's pick.

    `num_ranks` are the ranks asked for; None takes the cluster's devices. Raises ConfigError for a job that cannot be
    planned, and for other ranks than the run which is resumed has.
    """
    if resumed is not None and resumed.attempts:
        layout = resumed.attempts[-1].layout
        if num_ranks not in (None, layout.num_ranks):
            raise ConfigError(
                f"--ranks {num_ranks}: the run in {resolved.run_dir} has a layout of {layout.num_ranks} ranks, which a "
                "resume keeps: leave --ranks out, or set layout.search to false and the degrees by hand"
            )
        return SettledLayout(layout, resumed.estimate)
    request = plan_request(resolved, Options())
    if num_ranks is not None:
        request = request.with_setup(cluster=request.cluster.with_num_devices(num_ranks))
    if resolved.job.planner.simulate:
        from meshwright.app.simulated.simulated_plan import by_simulation

        pick = by_simulation(resolved, request)
    else:
        pick = make_plan(request, min_scored=0).pick
    return SettledLayout(pick.layout, pick.estimate)


def budget_layout(resolved: ResolvedJob, num_ranks: int, resumed: Manifest | None) -> SettledLayout:
    """Return the layout of a job with activation_checkpoint = "auto": what its blocks save in the run that is resumed
    by as many ranks, or else what a traced step has memory for; raises InfeasibleLayout where nothing fits.
    """
    if resumed is not None and resumed.attempts and resumed.attempts[-1].layout.num_ranks == num_ranks:
        return SettledLayout(resumed.attempts[-1].layout)
    return SettledLayout(settle_checkpoints(resolved, num_ranks))
