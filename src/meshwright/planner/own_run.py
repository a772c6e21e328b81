"""read_own_run: a Meshwright run folder as one measured run: its job, the layout it took, the steps that it timed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from meshwright.config.load import load_job
from meshwright.cost.case import Setting
from meshwright.cost.stacks import OURS, load_stack
from meshwright.errors import ConfigError
from meshwright.planner.ask import Options, question_of
from meshwright.planner.measured.read import MeasuredRun
from meshwright.planner.measured.row import RunRow
from meshwright.spec.layout import Layout
from meshwright.spec.run import Attempt, Manifest, Run

_NUM_WARM_UP, _FEWEST_STEPS = 3, 3
"""First steps of an attempt, which compile and allocate, and the least that must be left."""


def read_own_run(folder: Path) -> MeasuredRun:
    """Return the newest attempt of the run in `folder`; raises ConfigError where there is none that was timed."""
    run = Run(folder)
    attempt, number = _newest_attempt(run)
    step_s = _median_step_s(run, number)
    setting = _setting(run, attempt.layout)
    cells = {
        "id": folder.name,
        "source": str(folder),
        "stack": OURS,
        "gpu": setting.cluster.device.name,
        "n_gpus": str(attempt.layout.num_ranks),
        "step_time_s": f"{step_s:.9g}",
    }
    return MeasuredRun(RunRow(cells), setting, attempt.layout)


def _newest_attempt(run: Run) -> tuple[Attempt, int]:
    try:
        manifest = Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{run.folder} is no run folder: {run.manifest.name} cannot be read ({error.strerror}): name a folder that "
            "`meshwright train` made, or a CSV file of runs"
        ) from None
    except (ValidationError, UnicodeDecodeError):
        raise ConfigError(f"{run.manifest} is no manifest of this version: name another run folder") from None
    if not manifest.attempts:
        raise ConfigError(f"{run.folder} has not started any rank yet: name a run that has trained")
    return manifest.attempts[-1], len(manifest.attempts)


def _median_step_s(run: Run, attempt: int) -> float:
    """Return the median of the attempt's steps, the first few left out."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
        times_ms = [float(row["step_ms"]) for row in rows if row.get("attempt", attempt) == attempt]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run.metrics} cannot be read as metrics ({error}): name another run folder") from None
    timed = times_ms[_NUM_WARM_UP:]
    if len(timed) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run.folder}: its newest attempt has {len(times_ms)} steps, and the first {_NUM_WARM_UP} warm up: "
            f"train at least {_NUM_WARM_UP + _FEWEST_STEPS} steps"
        )
    return median(timed) / 1000


def _setting(run: Run, layout: Layout) -> Setting:
    """Return what the run's job is, on as many devices as it took."""
    question = question_of(load_job(str(run.job)), Options(stack=OURS))
    stack = load_stack(OURS).replace(kernels="compiled" if layout.compile else "eager")
    cluster = question.cluster.with_num_devices(layout.num_ranks)
    return Setting(question.setting.model, question.workload, cluster, stack)
