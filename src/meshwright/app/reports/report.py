"""report: measured steps of a run next to predicted ones; needs torch only to simulate, or to read a profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.app.arguments import checked
from meshwright.app.reports.run_waterfall import MeasuredStep, waterfall_of
from meshwright.app.results.run_result import ReportResult
from meshwright.app.results.stepless_result import SteplessResult
from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.evaluation.dataset.own_run import read_manifest, read_steps, setup_of_run
from meshwright.hardware.catalogue import example_of, with_example_rates
from meshwright.pages.tables.waterfall_lines import short_lines
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, cluster_of
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.finding import read_findings
from meshwright.spec.run.goodput import read_goodput
from meshwright.spec.run.run import Run, how_to_profile
from meshwright.spec.run.run_report import (
    LEAST_STEPS,
    RunMetrics,
    read_metrics,
    timed_attempt_of,
    timed_rows,
    untimed_layout,
)
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline

MEASURED = "measured"
"""The column of what was measured."""
_FEW = (
    f"the median is of few steps, which warm up too: no attempt has {LEAST_STEPS} steps, from which the first are left "
    "out; train on for a step time that can be compared with a prediction"
)


@checked
def report(folder: Path | str, *, simulate: bool = False) -> ReportResult:
    """Return what the run in `folder` measured and what is predicted of its layout on the machine that its job names.

    With `simulate` its step is also traced and simulated, which takes seconds to minutes and torch. Without it nothing
    is predicted of a model of your own. A run without an attempt of enough steps is timed by all steps of its newest,
    which the page says. Raises ConfigError where the folder is no run, or one without a finished step, of which
    `goodput_only` knows where its time went.
    """
    run = Run(folder)
    manifest, metrics = read_steps(run)
    if not len(metrics):
        raise ConfigError(f"{folder} has no finished step: name a run that has trained")
    layout, architecture = timed_attempt_of(manifest, metrics).layout, resolve_architecture(manifest.job.model)
    predicted, parts, example = None, {}, None
    if architecture is not None:
        setup = setup_of_run(run, manifest, layout)
        predicted = judge(layout, PlanRequest(manifest.job.model.source, architecture, setup))
        parts["predicted"] = predicted.estimate.step.summed()
        example = example_of(setup.cluster.device)
    measured = _measured(run, manifest.job, metrics)
    if simulate:
        simulated = _simulated(run, manifest.job, layout)
        measured, parts["simulated"] = measured._replace(simulated=simulated), decompose(simulated)
    if measured.profiled is not None:
        parts[MEASURED] = decompose(measured.profiled.timeline)
    waterfall = waterfall_of(ResolvedJob(manifest.job, {}, run.job), layout, measured)
    return ReportResult(
        run.folder,
        manifest,
        metrics,
        predicted,
        measured.median_s,
        parts,
        waterfall,
        example,
        read_goodput(run),
        tuple(read_findings(run.findings)),
    )


@checked
def goodput_only(folder: Path | str) -> SteplessResult | None:
    """Return where the time of a run went that has not finished a step; None for one that has.

    Raises ConfigError where the folder is no run, or says no time.
    """
    run = Run(folder)
    manifest = read_manifest(run)
    if run.metrics.exists() and len(read_metrics(run)):
        return None
    found = read_goodput(run)
    if found is None:
        raise ConfigError(f"{folder} has no finished step, and {run.events} says no time: name a run that has trained")
    return SteplessResult(run.folder, len(manifest.attempts), found)


def short_report(run: Run) -> list[str]:
    """Return where the steps of a run that has ended went, in a few lines; none for one with too few steps to time, all
    of them or those of its newest layout.

    A run is not less done because its profile cannot be read: that is a line, too.
    """
    try:
        manifest, metrics = read_steps(run)
        if not metrics.is_timed or untimed_layout(manifest, metrics) is not None:
            return []
        layout = timed_attempt_of(manifest, metrics).layout
        found = waterfall_of(ResolvedJob(manifest.job, {}, run.job), layout, _measured(run, manifest.job, metrics))
    except MeshwrightError as error:
        return [f"where the step goes is unknown: {error}"]
    return [*short_lines(found, how_to_profile(manifest.job)), f"all of it: meshwright report {run.folder}"]


def _measured(run: Run, job: Job, metrics: RunMetrics) -> MeasuredStep:
    """Return the median step of a run without its profiled ones, and the median one of those if it has any."""
    rows = timed_rows(metrics, job)
    step_s, wait_s = (float(np.median(seconds[rows])) for seconds in (metrics.step_s, metrics.data_wait_s))
    few = "" if metrics.is_timed else _FEW
    measured = MeasuredStep(step_s, metrics.words_of(rows), wait_s, few=few)
    # Reading a profile takes torch, which a machine that only reads a run may lack.
    if not any(run.timelines.glob("*.json.gz")):
        return measured
    from meshwright.profiler.profiled_timeline import median_step_of, profiled_files

    return measured._replace(profiled=median_step_of(profiled_files(run.folder), str(run.folder)))


def _simulated(run: Run, job: Job, layout: Layout) -> Timeline:
    """Return the run's step, traced and simulated on the machine that the job names."""
    from meshwright.config.load import load_job
    from meshwright.simulator.engine.conditions import Conditions
    from meshwright.simulator.simulate_step import simulate
    from meshwright.tracer.programs.trace_ranks import device_type_of
    from meshwright.tracer.trace_job import trace_job
    from meshwright.trainer.step.step_builder import TRAINER_STEP

    # What was left open when the run started has been settled.
    keys = {name: value for name, value in layout.model_dump().items() if value is not None}
    keys |= {"search": False, "memory_budget_bytes": None}
    resolved = load_job(run.job)
    resolved = replace(resolved, job=resolved.job.replace(layout=resolved.job.layout.replace(**keys)))
    cluster = with_example_rates(cluster_of(job, Options(), {})).with_num_devices(layout.num_ranks)
    device = device_type_of(cluster.device)
    traces = trace_job(TRAINER_STEP, resolved, layout.num_ranks, device=device)
    return simulate(traces, cluster, str(run.folder), Conditions().under(layout))
