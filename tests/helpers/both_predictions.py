"""One step of the trainer predicted both ways: by the planner's formulas, and by simulating its trace."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.config.load import ResolvedJob, load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.request import PlanRequest
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.step.estimate import COMPONENTS, Estimate
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.programs.trace_ranks import device_type_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP


class BothPredictions(NamedTuple):
    """The formulas' estimate of a layout, and its simulated step."""

    resolved: ResolvedJob
    request: PlanRequest
    layout: Layout
    estimate: Estimate
    traces: Traces
    timeline: Timeline

    @property
    def allocated_bytes(self) -> float:
        """Return the most that any simulated rank allocates."""
        return max(float(curve.allocated_bytes.max()) for curve in self.timeline.memory)

    def component_errors(self) -> dict[str, float]:
        """Return how far the formulas are off in each component, as shares of the simulated step."""
        expected, found = self.estimate.step.summed(), decompose(self.timeline)
        return {name: (getattr(expected, name) - getattr(found, name)) / self.timeline.step_s for name in COMPONENTS}

    def require_equal_components(self, most_off: float) -> None:
        assert {name: share for name, share in self.component_errors().items() if abs(share) > most_off} == {}

    def require_equal_steps(self, most_off: float) -> None:
        """Compare the whole step and its components."""
        assert self.timeline.step_s == pytest.approx(self.estimate.step.total_s, rel=most_off)
        self.require_equal_components(most_off)


def predict_both(
    folder: Path, job: str, overrides: str, cluster: str = "h100-ib400", measured: Cluster | None = None
) -> BothPredictions:
    """Return the predictions of a job file's text with `overrides` on as many ranks as its layout names.

    `measured` takes the place of the cluster's entry in the catalogue.
    """
    file = folder / "job.toml"
    file.write_text(job, encoding="utf-8")
    resolved = load_job(file, tuple(overrides.split()))
    num_ranks = resolved.job.layout.num_fixed_ranks
    request = plan_request(resolved, Options(f"{cluster}:{num_ranks}"))
    if measured is not None:
        request = request.with_setup(cluster=measured)
    layout = layout_of(resolved.job, num_ranks)
    estimate = judge(layout, request).estimate
    assert isinstance(estimate, Estimate)
    device = device_type_of(request.cluster.device)
    traces = trace_job(TRAINER_STEP, resolved, num_ranks, device=device, how=TraceOptions(use_cache=False))
    return BothPredictions(resolved, request, layout, estimate, traces, simulate(traces, request.cluster))
