"""read_own_run: a Meshwright run folder as one measured run: its job, the layout it took, the steps that it timed."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from meshwright.config.load import ResolvedJob
from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.own_stack import OwnChoices, own_stack
from meshwright.cost.stack_factors import OURS
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.dataset.row import RunRow
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.run.run import Manifest, Run, manifest_fault
from meshwright.spec.run.run_report import LEAST_STEPS, RunMetrics, read_metrics, timed_attempt_of, timed_rows
from meshwright.units import counted


def read_own_run(folder: Path) -> MeasuredRun:
    """Return the timed attempt of the run in `folder`; raises ConfigError where there is none."""
    run = Run(folder)
    manifest, metrics = read_steps(run)
    layout = timed_layout(run, manifest, metrics)
    setup = setup_of_run(run, manifest, layout)
    cells = {
        "id": folder.name,
        "source": str(folder),
        "stack": OURS,
        "gpu": setup.cluster.device.name,
        "n_gpus": str(layout.num_ranks),
        "step_time_s": f"{np.median(metrics.step_s[timed_rows(metrics, manifest.job)]):.9g}",
    }
    return MeasuredRun(RunRow(cells), setup, layout)


def read_steps(run: Run) -> tuple[Manifest, RunMetrics]:
    """Return the manifest of a run that has started, and its steps; raises ConfigError unless both are of one run."""
    manifest, metrics = read_manifest(run), read_metrics(run)
    starts, newest = len(manifest.attempts), max(metrics.attempt, default=0)
    if newest > starts:
        raise ConfigError(
            f"{run.metrics} has steps of start {newest} of the ranks, of which {run.manifest.name} lists {starts}: "
            "they are of two runs; copy both files from one run, or name another folder"
        )
    return manifest, metrics


def read_manifest(run: Run) -> Manifest:
    """Return the manifest of a run that has started; raises ConfigError where there is none."""
    try:
        manifest = Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{run.folder} is no run folder: {run.manifest.name} cannot be read ({error.strerror}): name a folder that "
            "`meshwright train` made"
        ) from None
    except (UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{run.manifest} {manifest_fault(error)}: restore it from a copy, or name another run folder"
        ) from None
    if not manifest.attempts:
        raise ConfigError(f"{run.folder} has not started any rank yet: name a run that has trained")
    return manifest


def timed_layout(run: Run, manifest: Manifest, metrics: RunMetrics) -> Layout:
    """Return the layout of the attempt that step times are of; raises ConfigError where none has enough steps."""
    if not metrics.is_timed:
        raise ConfigError(
            f"{run.folder} has {counted(len(metrics), 'step')} and no attempt of {LEAST_STEPS} or more, the first of "
            "which warm up: train longer"
        )
    return timed_attempt_of(manifest, metrics).layout


def setup_of_run(run: Run, manifest: Manifest, layout: Layout) -> TrainingSetup:
    """Return what was trained, and on what; raises MeshwrightError where it cannot be priced."""
    job = manifest.job.replace(layout=LayoutRequest.model_validate(layout.model_dump()))
    setup = plan_request(ResolvedJob(job, {}, run.job), Options(stack=OURS, takes_example=True)).setup
    stack = own_stack(
        setup.stack,
        OwnChoices(layout.compiles_blocks, layout.compile_loss, layout.compile_optimizer, layout.cuda_graphs),
    )
    cluster = setup.cluster.with_num_devices(layout.num_ranks)
    found = TrainingSetup(setup.model, setup.workload, cluster, stack, memory=setup.memory)
    peaks_of((found,))  # raises for a device without the rates that pricing needs
    return found
