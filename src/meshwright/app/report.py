"""report: measured steps of a run next to predicted ones; needs torch only to simulate, or to read a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.app.results.run_result import ReportResult
from meshwright.evaluation.dataset.own_run import read_manifest, read_own_run, request_of_run
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.hardware.catalogue import example_of
from meshwright.planner.candidate import judge
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_report import read_metrics
from meshwright.spec.step.step_decomposition import StepDecomposition
from meshwright.spec.step.timeline_decomposition import decompose

MEASURED = "measured"
"""The column of what was measured."""


def report(folder: Path | str, *, simulate: bool = False) -> ReportResult:
    """Return what the run in `folder` measured and what is predicted of its layout on the machine that its job names.

    With `simulate` its step is also traced and simulated, which takes seconds to minutes and torch. Raises ConfigError
    where the folder is no run, or one without a timed step.
    """
    folder = Path(folder)
    run = read_own_run(folder)
    assert run.layout is not None
    assert run.row.measured_s is not None
    assert run.setup is not None
    predicted = judge(run.layout, request_of_run(run))
    parts = {"predicted": predicted.estimate.step.summed()}
    if simulate:
        parts["simulated"] = _simulated(folder, run)
    # Reading a profile takes torch, which a machine that only reads a run may lack.
    if any(Run(folder).timelines.glob("*.json.gz")):
        from meshwright.profiler.profiled_timeline import profile_of_run

        parts[MEASURED] = decompose(profile_of_run(folder))
    manifest, metrics = read_manifest(Run(folder)), read_metrics(Run(folder))
    example = example_of(run.setup.cluster.device)
    return ReportResult(folder, manifest, metrics, predicted, run.row.measured_s, parts, example)


def _simulated(folder: Path, run: MeasuredRun) -> StepDecomposition:
    """Return the run's step, traced and simulated on the machine that the job names."""
    from meshwright.config.load import load_job
    from meshwright.simulator.simulate_step import simulate
    from meshwright.tracer.programs.trace_ranks import device_type_of
    from meshwright.tracer.trace_job import trace_job
    from meshwright.trainer.step.step_builder import TRAINER_STEP

    assert run.layout is not None
    assert run.setup is not None
    # What was left open when the run started has been settled.
    keys = {name: value for name, value in run.layout.model_dump().items() if value is not None} | {"search": False}
    resolved = load_job(Run(folder).job)
    resolved = replace(resolved, job=resolved.job.replace(layout=resolved.job.layout.replace(**keys)))
    cluster = run.setup.cluster
    device = device_type_of(cluster.device)
    traces = trace_job(TRAINER_STEP, resolved, run.layout.num_ranks, device=device)
    return decompose(simulate(traces, cluster, str(folder)))
