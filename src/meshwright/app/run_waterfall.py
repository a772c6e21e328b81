"""waterfall_of: a run's, or a profile's, step by cause next to the prediction, with the largest potential speedup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.config.load import ResolvedJob
from meshwright.cost.stack_factors import OURS
from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.hardware.catalogue import example_of
from meshwright.planner.candidate import judge
from meshwright.planner.explain.best_change import best_changes
from meshwright.planner.explain.predicted_causes import PricedFloor, floor_of, predicted_causes, share_of_rank
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.request import PlanRequest, float8_note
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_causes import Floor, causes_of, critical_rank
from meshwright.spec.step.step_waterfall import Waterfall, timed_parts

if TYPE_CHECKING:
    from meshwright.profiler.profiled_timeline import ProfiledSteps
    from meshwright.spec.trace.timeline import Timeline


class MeasuredStep(NamedTuple):
    """What was measured of a step."""

    median_s: float
    """Of steps without a profiler."""
    timed: str
    """Which steps these are."""
    data_wait_s: float
    """Median wait for data of these steps; nan where it is unknown."""
    profiled: ProfiledSteps | None = None
    """A profiled step; None where there is no profile."""
    simulated: Timeline | None = None
    """The simulated step; None where none was asked for."""


def waterfall_of(resolved: ResolvedJob, layout: Layout, measured: MeasuredStep) -> Waterfall:
    """Return the step of a job in a concrete layout: of the critical rank where one was profiled, else the mean.

    A model that formulas do not know, or a machine without rates, has no prediction; the waterfall says why.
    """
    request, unpriced = None, ""
    try:
        _require_known(resolved.job.model)
        request = request_of(resolved, layout)
        priced, step = floor_of(layout, request), judge(layout, request).estimate.step
    except MeshwrightError as error:
        priced, step, unpriced = PricedFloor(Floor(), 0.0), None, str(error)
    profiled = measured.profiled
    rank = None if profiled is None else critical_rank(profiled.timeline)
    pipeline_rank = rank // (layout.num_ranks // layout.pp) if rank is not None and layout.pp > 1 else None
    if request is None or step is None:
        predicted = None
    else:
        share = 1.0 if pipeline_rank is None else share_of_rank(layout, pipeline_rank, request)
        predicted = predicted_causes(step, priced, share)
    found = _measured(measured, priced.floor, rank)
    return Waterfall(
        measured=found,
        source="timers" if profiled is None else "profile",
        measured_s=measured.median_s,
        timed=measured.timed,
        predicted=predicted,
        simulated=_simulated(measured.simulated, priced.floor, rank),
        step=None if profiled is None else profiled.step,
        num_steps=0 if profiled is None else profiled.num_steps,
        rank=rank,
        num_ranks=layout.num_ranks,
        pipeline_rank=pipeline_rank,
        is_floor_lowered=profiled is not None and found.model_flops_at_peak_s < 0.999 * priced.floor.total_s,
        unpriced=unpriced,
        **({} if request is None else _outlook(request, resolved, layout)),
    )


def _require_known(model: ModelSection) -> None:
    if resolve_architecture(model) is None:
        raise UnsupportedError(
            f"the formulas do not know the operations of {model.source}, a class of your own; `meshwright simulate` "
            "traces its step"
        )


def request_of(resolved: ResolvedJob, layout: Layout) -> PlanRequest:
    """Return what the planner is asked of a job that trains in `layout`; raises MeshwrightError where it has no price.

    The stack is our own with eager kernels, so that layout.compile is one of the keys that can change.
    """
    job = resolved.job.replace(layout=LayoutRequest.model_validate(layout.model_dump()))
    request = plan_request(ResolvedJob(job, {}, resolved.path), Options(stack=OURS, takes_example=True))
    return request.with_setup(cluster=request.cluster.with_num_devices(layout.num_ranks))


def _outlook(request: PlanRequest, resolved: ResolvedJob, layout: Layout) -> dict[str, Any]:
    """Return what a waterfall says besides its causes: the interval, the rates, the best changes."""
    return {
        "relative_error": judge(layout, request).estimate.relative_error,
        "rates_of": example_of(request.cluster.device),
        "changes": best_changes(layout, request),
        "notes": tuple(_notes(request, resolved, layout)),
    }


def _notes(request: PlanRequest, resolved: ResolvedJob, layout: Layout) -> Iterator[str]:
    device = request.cluster.device
    if note := float8_note(resolved.job, device):
        yield note
    if device.is_host and layout.fsdp > 1:
        yield (
            "on a CPU the formulas count FSDP2's copies and its Python as DP communication, as they were calibrated; "
            "a profile finds them in other kernels and CPU-bound: compare the sum of the three"
        )


def _measured(measured: MeasuredStep, floor: Floor, rank: int | None) -> StepDecomposition:
    if measured.profiled is None or rank is None:
        return timed_parts(measured.median_s, measured.data_wait_s)
    return causes_of(measured.profiled.timeline, rank, floor)


def _simulated(timeline: Timeline | None, floor: Floor, rank: int | None) -> StepDecomposition | None:
    if timeline is None:
        return None
    # Ranks that do the same are simulated once, as the first of them.
    simulated = max((one for one in timeline.ranks if one <= rank), default=None) if rank is not None else None
    return causes_of(timeline, critical_rank(timeline) if simulated is None else simulated, floor)
