"""read_own_run: a Meshwright run folder as one measured run: its job, the layout it took, the steps that it timed."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from pydantic import ValidationError

from meshwright.config.load import ResolvedJob
from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.stacks import OURS
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.dataset.row import RunRow
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.layout.layout import LayoutRequest
from meshwright.spec.run.run import Manifest, Run
from meshwright.spec.run.run_report import RunMetrics, read_metrics

_NUM_WARM_UP, _FEWEST_STEPS = 3, 3
"""First steps of an attempt, which compile and allocate, and the least that must be left."""


def read_own_run(folder: Path) -> MeasuredRun:
    """Return the newest attempt of the run in `folder`; raises ConfigError where there is none that was timed."""
    run = Run(folder)
    manifest = read_manifest(run)
    layout = manifest.attempts[-1].layout
    step_s = median_step_s(run, read_metrics(run), len(manifest.attempts))
    setup = setup_of_run(run, manifest)
    cells = {
        "id": folder.name,
        "source": str(folder),
        "stack": OURS,
        "gpu": setup.cluster.device.name,
        "n_gpus": str(layout.num_ranks),
        "step_time_s": f"{step_s:.9g}",
    }
    return MeasuredRun(RunRow(cells), setup, layout)


def read_manifest(run: Run) -> Manifest:
    """Return the manifest of a run that has started; raises ConfigError where there is none."""
    try:
        manifest = Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{run.folder} is no run folder: {run.manifest.name} cannot be read ({error.strerror}): name a folder that "
            "`meshwright train` made"
        ) from None
    except (ValidationError, UnicodeDecodeError):
        raise ConfigError(f"{run.manifest} is no manifest of this version: name another run folder") from None
    if not manifest.attempts:
        raise ConfigError(f"{run.folder} has not started any rank yet: name a run that has trained")
    return manifest


def median_step_s(run: Run, metrics: RunMetrics, attempt: int) -> float:
    """Return the median of the attempt's steps, the first few left out; raises ConfigError where too few are left."""
    times_s = metrics.step_s[metrics.attempt == attempt].tolist()
    timed = times_s[_NUM_WARM_UP:]
    if len(timed) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run.folder}: its newest attempt has {len(times_s)} steps, and the first {_NUM_WARM_UP} warm up: "
            f"train at least {_NUM_WARM_UP + _FEWEST_STEPS} steps"
        )
    return float(median(timed))


def setup_of_run(run: Run, manifest: Manifest) -> TrainingSetup:
    """Return what was trained, and on what; raises MeshwrightError where it cannot be priced."""
    layout = manifest.attempts[-1].layout
    job = manifest.job.replace(layout=LayoutRequest.model_validate(layout.model_dump()))
    setup = plan_request(ResolvedJob(job, {}, run.job), Options(stack=OURS, takes_example=True)).setup
    stack = setup.stack.replace(kernels="compiled" if layout.compiles_blocks else "eager")
    cluster = setup.cluster.with_num_devices(layout.num_ranks)
    found = TrainingSetup(setup.model, setup.workload, cluster, stack)
    peaks_of((found,))  # raises for a device without the rates that pricing needs
    return found
