"""check: what is wrong with a job, or what it would do; starts nothing and needs no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from rich.text import Text

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.job.check_figures import CheckFigures, check_figures
from meshwright.app.job.compile_choice import settled_on
from meshwright.app.job.cpu_training import trains_on_cpu
from meshwright.app.job.job_problems import check_job, run_folder
from meshwright.app.job.jobs import all_of, inspect_job_here, raise_all
from meshwright.app.job.reference_words import reference_scoring
from meshwright.app.job.settle_float8 import settle_float8_for_check
from meshwright.app.job.summary import summary
from meshwright.app.results.result import Result
from meshwright.config.load import ResolvedJob
from meshwright.errors import InfeasibleLayout, MeshwrightError, problems_raised_by
from meshwright.hardware.catalogue import LOCAL
from meshwright.hardware.choice import cluster_of_section, named_cluster
from meshwright.planner.candidate import judge
from meshwright.planner.explain.verdict import Verdict, verdict
from meshwright.planner.plan import find
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.recompute_choice import with_recompute
from meshwright.planner.request import PlanRequest, rate_problem
from meshwright.planner.run_cost import predicted_interval
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.attention_rules import device_problem
from meshwright.spec.job.rules.memory_rules import pool_device_problems
from meshwright.spec.layout.device_rules import layout_device_problems
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.run.run_folder import require_same_run
from meshwright.units import counted, format_bytes, format_duration


@dataclass(frozen=True, repr=False)
class Checked(Result):
    """A valid job."""

    lines: tuple[tuple[str, str], ...]
    """Label and text of each thing to know: the model, the batch, the layout, the step and memory predicted."""
    misfit: InfeasibleLayout | None
    """Why the layout does not fit the devices of the job's cluster; None where it does, or that is unknown."""
    figures: CheckFigures
    """The numbers that the lines say in words."""

    def to_json(self) -> str:
        """Return what `meshwright check --json` prints."""
        misfits = [] if self.misfit is None else [str(self.misfit)]
        record = {"is_valid": not misfits, "error": misfits[0] if misfits else None, "problems": misfits}
        return json.dumps({**record, "lines": self.lines, "figures": asdict(self.figures)}, indent=2)

    def _summary(self) -> str:
        return f"Check {dict(self.lines)['job']}"

    def _page(self) -> Iterator[Text]:
        # Not wrapped: lines of a log are searched.
        yield Text("\n".join(f"{label:<8}{text}" for label, text in self.lines))

    def _rows(self) -> list[dict[str, Any]]:
        return [{"label": label, "text": text} for label, text in self.lines]


@checked
def check(
    job: JobSource,
    *overrides: str,
    ranks: Positive | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Checked:
    """Return what the job would do on `ranks` ranks (None: as the layout says); `resume` and `overwrite` as for train.

    Raises one ConfigError with all that is wrong, and InfeasibleLayout where the planner is to choose the layout and
    none fits.
    """
    inspection = inspect_job_here(job, overrides)
    resolved, unknown = inspection.resolved, inspection.unknown
    layout = resolved.job.layout
    # One rank is no layout: the planner is to choose it.
    if ranks is None and (layout.rest_axis is not None or (layout.is_open and layout.num_ranks > 1)):
        ranks = resolved.job.cluster.num_devices
    fits = partial(_fits, resolved, ranks) if _is_priced(resolved.job) else None
    found = check_job(resolved, ranks, resume=resume, overwrite=overwrite, unknown=unknown, fits=fits)
    found += [resolved.located(text) for text in device_problems(resolved.job)]
    if resume and not inspection.problems:
        found += problems_raised_by(lambda: require_same_run(run_folder(resolved), resolved.job))
    raise_all(resolved, all_of(inspection, found), ranks, unknown, fits)
    if (unsearchable := search_problem(resolved, ranks)) is not None:
        raise unsearchable
    predicted, misfit, found_verdict, reference_scoring_s = estimate(resolved, ranks)
    settled, note = settle_float8_for_check(resolved, ranks)
    notes = [("note", text) for text in (note, resume_note(resolved) if resume else None) if text]
    notes += [("note", text) for text in _interval_note(resolved.job)]
    lines = (*summary(settled, ranks), *predicted, *notes)
    if misfit is not None:
        first = ("job", f"{resolved.path}: keys valid, layout does not fit")
        lines = (first, *(line for line in lines if line[0] != "job"))
    figures = replace(check_figures(settled.job, ranks, found_verdict), reference_scoring_s=reference_scoring_s)
    return Checked(lines, misfit, figures)


def _interval_note(job: Job) -> Iterator[str]:
    """Yield that blocks are recomputed at a distance that the model's blocks do not reach."""
    every, architecture = job.layout.activation_checkpoint_every, resolve_architecture(job.model)
    if architecture is not None and every > architecture.num_layers:
        yield (
            f"layout.activation_checkpoint_every = {every} is more than the model's num_layers = "
            f"{architecture.num_layers}: the first block of each stage alone is recomputed"
        )


def resume_note(resolved: ResolvedJob) -> str | None:
    """Return that a run which is to be resumed has no checkpoint, as one of a mistyped name; None where it has one."""
    run = run_folder(resolved)
    if run.checkpoint_steps() or resolved.job.checkpoint.remote is not None:
        return None
    return f"--resume: {run.folder} holds no checkpoint, so training would start at step 0"


def device_problems(job: Job) -> list[str]:
    """Return which memory pools the device of the cluster lacks, that it cannot limit the SMs of communication so or
    attend by the job's kernels, and that it has no rate for the job's precision, without which no verb predicts it.

    Empty for this machine, and for a cluster that is unknown. Training itself needs no rate, and is not refused.
    """
    if job.cluster.name == LOCAL:
        return []
    try:
        device = named_cluster(job.cluster.name).device
    except MeshwrightError:
        return []
    problem = rate_problem(device, job.precision.compute)
    # Where run.device names a kind, the rules of the job have said it of that one.
    is_open = job.run.device == "auto"
    backend, compute = job.layout.attention_backend, job.precision.compute
    attention = device_problem(backend, compute, device.torch_type) if is_open else None
    lacking = [*pool_device_problems(job.memory, device), *layout_device_problems(job.layout, device)]
    if attention is not None and attention.subject in {one.subject for one in lacking}:
        attention = None  # of a kernel that the device lacks no format matters
    return [*lacking, *(one for one in (attention, problem) if one is not None)]


class CheckPrediction(NamedTuple):
    """What is predicted of a job's own layout on its cluster."""

    lines: list[tuple[str, str]]
    """Label and line of the step and the memory."""
    misfit: InfeasibleLayout | None = None
    """Why it does not fit."""
    verdict: Verdict | None = None
    """The numbers; None where there are none."""
    reference_scoring_s: float | None = None
    """Seconds in which the reference of a dpo job scores all pairs."""


def estimate(resolved: ResolvedJob, num_ranks: int | None) -> CheckPrediction:
    """Return the step and the memory predicted on the job's cluster.

    No line where the model is a user's own, or the planner chooses the layout. Of this machine, whose step is not
    predicted, there is only what blocks save where the job says "auto".
    """
    job = resolved.job
    count = _count(job, num_ranks)
    if job.layout.search or count is None or resolve_architecture(job.model) is None:
        return CheckPrediction([])
    if job.cluster.name == LOCAL:
        return _recompute_here(resolved, count)
    try:
        request = _request(resolved, count)
        found = verdict(request)
    except MeshwrightError as error:
        return CheckPrediction([("step", f"not estimated: {error}")])
    cluster = request.cluster
    step, usable = format_duration(found.candidate.estimate.step.total_s), format_bytes(found.usable_bytes)
    where = f", on pipeline rank {found.fullest_rank}" if job.layout.pp > 1 else ""
    memory = f"{format_bytes(found.reserved_bytes)} reserved of {usable} usable{where}"
    if found.host is not None:
        memory += (
            f"; {format_bytes(found.host.needed_bytes)} of a rank's {format_bytes(found.host.usable_bytes)} on the host"
        )
    if 0 <= found.candidate.headroom_bytes < found.margin_bytes:
        memory += f"; layouts that the planner chooses leave {format_bytes(found.margin_bytes)} free"
    if not cluster.device.has_own_memory:
        memory += "; `mem` of train is the whole process on a CPU, with torch itself"
    notes = [("tight", found.tight)] if found.tight else []
    if job.checkpoint.interval == "auto":
        step_s, rate = found.candidate.estimate.step.total_s, job.cluster.failures_per_device_day
        notes.append(("saves", f"{predicted_interval(request, step_s, rate)}; the run chooses by what it measures"))
    reference = reference_scoring(job, request, found.candidate)
    notes += [] if reference is None else [("scoring", f"the reference is {reference.text}")]
    misfit = found.problem() or request.recompute_misfit
    notes += _recompute_notes(request, misfit)
    lines = [("step", f"{step} predicted on {cluster.name}"), ("memory", memory), *notes]
    return CheckPrediction(lines, misfit, found, None if reference is None else reference.scoring_s)


def _recompute_here(resolved: ResolvedJob, count: int) -> CheckPrediction:
    """Return what blocks are expected to save on this machine, where the job says "auto" and the device is known."""
    job = resolved.job
    is_known = job.cluster.device is not None or trains_on_cpu(job)
    if job.layout.activation_checkpoint != "auto" or not is_known:
        return CheckPrediction([])
    try:
        request = _request(resolved, count)
    except MeshwrightError as error:
        return CheckPrediction([("note", f'layout.activation_checkpoint = "auto" is not priced: {error}')])
    misfit = request.recompute_misfit
    return CheckPrediction(_recompute_notes(request, misfit), misfit)


def _recompute_notes(request: PlanRequest, misfit: InfeasibleLayout | None) -> list[tuple[str, str]]:
    """Return the note on what blocks save, without one that says the same as the error that follows the page."""
    if not request.recompute_note or (misfit is not None and misfit is request.recompute_misfit):
        return []
    return [("note", request.recompute_note)]


def _count(job: Job, num_ranks: int | None) -> int | None:
    """Return the ranks of a job, None where they are not known yet."""
    return num_ranks or (job.layout.num_ranks if job.layout.rest_axis is None else job.cluster.num_devices)


def _request(resolved: ResolvedJob, count: int) -> PlanRequest:
    """Return the job's own layout on `count` devices of its cluster; raises MeshwrightError if it cannot be priced."""
    on_count = _on(resolved, count)
    section = on_count.job.cluster
    cluster = cluster_of_section(section).with_num_devices(count, f"a layout of {counted(count, 'rank')}")
    settled = settled_on(on_count, cluster)
    # Of this machine only memory is read, so that an example's rates do.
    options = Options(takes_example=section.name == LOCAL)
    request = replace(plan_request(settled, options), given=settled.job.layout.resolve(count))
    return with_recompute(request, settled.job.layout.memory_budget_bytes)


def _fits(resolved: ResolvedJob, num_ranks: int | None, job: Job) -> bool:
    """Return whether `job`, which is `resolved` with keys changed, fits its devices; True where that is not known."""
    if job.layout.search or (count := _count(job, num_ranks)) is None:
        return True
    try:
        request = _request(replace(resolved, job=job), count)
        assert request.given is not None
        return judge(request.given, request).fits
    except MeshwrightError:
        return True


def search_problem(resolved: ResolvedJob, num_ranks: int | None) -> InfeasibleLayout | None:
    """Return why the planner finds no layout for a job that leaves it open; None where it does, or that is unknown."""
    if not _is_priced(resolved.job) or not resolved.job.layout.search:
        return None
    try:
        find(plan_request(resolved if num_ranks is None else _on(resolved, num_ranks), Options()), min_scored=0)
    except InfeasibleLayout as problem:
        return problem
    except MeshwrightError:
        return None
    return None


def _is_priced(job: Job) -> bool:
    """Return whether the planner knows the cluster, not being this machine, and the model, not being a user's own."""
    return job.cluster.name != LOCAL and resolve_architecture(job.model) is not None


def _on(resolved: ResolvedJob, num_devices: int) -> ResolvedJob:
    """Return the job on as many devices of its cluster."""
    job = resolved.job
    return replace(resolved, job=job.replace(cluster=job.cluster.replace(num_devices=num_devices)))
