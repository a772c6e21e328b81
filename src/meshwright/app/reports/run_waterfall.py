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
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.step.estimate import Estimate, StepDecomposition
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
    few: str = ""
    """That the median is of too few steps to leave out the first; empty where it is not."""


def waterfall_of(resolved: ResolvedJob, layout: Layout, measured: MeasuredStep) -> Waterfall:
    """Return the step of a job in a concrete layout: of the critical rank where one was profiled, else the mean.

    A model that formulas do not know, or a machine without rates, has no prediction; the waterfall says why.
    """
    profiled, prediction, unpriced = measured.profiled, None, ""
    try:
        prediction = _predict(resolved, layout)
    except MeshwrightError as error:
        unpriced = str(error)
    floor = Floor() if prediction is None else prediction.priced.floor
    about: dict[str, Any] = {"measured_s": measured.median_s, "timed": measured.timed, "unpriced": unpriced}
    if profiled is None:
        about |= {"source": "timers", "measured": timed_parts(measured.median_s, measured.data_wait_s)}
        rank = pipeline_rank = None
    else:
        rank = critical_rank(profiled.timeline)
        pipeline_rank = rank // (layout.num_ranks // layout.pp) if layout.pp > 1 else None
        causes = causes_of(profiled.timeline, rank, floor)
        about |= {"source": "profile", "measured": causes, "step": profiled.step, "num_steps": profiled.num_steps}
        about |= {"is_floor_lowered": causes.model_flops_at_peak_s < 0.999 * floor.total_s}
    notes = [measured.few] if measured.few else []
    if prediction is not None:
        about |= _outlook(prediction, layout, pipeline_rank)
        notes += _notes(prediction.request, layout, is_profiled=profiled is not None)
    found = Waterfall(
        simulated=_simulated(measured.simulated, floor, rank),
        rank=rank,
        num_ranks=layout.num_ranks,
        pipeline_rank=pipeline_rank,
        notes=tuple(notes),
        **about,
    )
    return found.replace(changes=tuple(found.compared(one) for one in found.changes))


class _Prediction(NamedTuple):
    """What the formulas say of a step."""

    request: PlanRequest
    priced: PricedFloor
    estimate: Estimate


def _predict(resolved: ResolvedJob, layout: Layout) -> _Prediction:
    """Return the prediction of a job in a concrete layout; raises MeshwrightError where there is none."""
    _require_known(resolved.job.model)
    request = request_of(resolved, layout)
    return _Prediction(request, floor_of(layout, request), judge(layout, request).estimate)


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


def _outlook(found: _Prediction, layout: Layout, pipeline_rank: int | None) -> dict[str, Any]:
    """Return the fields of a waterfall that are predicted, the causes those of a pipeline rank if one is named."""
    share = 1.0 if pipeline_rank is None else share_of_rank(layout, pipeline_rank, found.request)
    return {
        "predicted": predicted_causes(found.estimate.step, found.priced, share),
        "relative_error": found.estimate.relative_error,
        "rates_of": example_of(found.request.cluster.device),
        "changes": best_changes(layout, found.request),
    }


def _notes(request: PlanRequest, layout: Layout, *, is_profiled: bool) -> Iterator[str]:
    """Yield what to know of a prediction that is compared with a measurement."""
    device = request.cluster.device
    if request.float8_note:
        yield request.float8_note
    if is_profiled and device.torch_type == "cpu" and layout.fsdp > 1:
        yield (
            "on a CPU the formulas count FSDP2's copies and its Python as DP communication, as they were calibrated; "
            "a profile finds them in memory-bound ops and CPU-bound: compare the sum of the three"
        )


def _simulated(timeline: Timeline | None, floor: Floor, rank: int | None) -> StepDecomposition | None:
    if timeline is None:
        return None
    # Of ranks that do the same one is simulated.
    own = rank if rank is not None and rank in timeline.ranks else critical_rank(timeline)
    return causes_of(timeline, own, floor)
