"""run_case: one row, by a process of its own, so that each has the device for itself."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.gpu_suite.cases import MODULES, OURS, Case
from benchmarks.gpu_suite.predicted import peak_s, predict
from benchmarks.peers.rank_processes import RankFailed, RankProcesses
from meshwright.spec.job.job import Job

NUM_WARM_UP, NUM_STEPS = 3, 10
"""Steps before and within the measurement."""


@dataclass(frozen=True)
class Measured:
    """One row, as JSON holds it."""

    name: str
    step_s: float = 0.0
    """Median."""
    spread: float = 0.0
    """Width of the middle half of the steps, as a share of the median."""
    peak_bytes: int = 0
    losses: tuple[float, ...] = ()
    """Of each step, from the first on."""
    peak_step_s: float | None = None
    """What the step would take at the peak of bfloat16; MFU is this over step_s."""
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    took_s: float = 0.0
    """From the start of the process to its end."""
    failure: str = ""
    """Why there are no figures; empty if there are."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def run_case(case: Case, folder: Path, job: Job, timeout_s: float) -> Measured:
    """Return the figures of `case`, whose task lies in `folder`; a failure is one of them."""
    started_s = time.monotonic()
    shutil.rmtree(folder / "runs", ignore_errors=True)
    module = f"benchmarks.peers.ranks.{MODULES[case.who]}"
    command = (sys.executable, "-m", module, str(folder), *case.arguments)
    try:
        with RankProcesses(command, dict(os.environ), 1, folder / "rank") as processes:
            processes.wait_ready(timeout_s)
            answers = [processes.turn(timeout_s)[0] for _ in range(NUM_WARM_UP + NUM_STEPS)]
    except RankFailed as failure:
        return Measured(case.name, took_s=time.monotonic() - started_s, failure=str(failure)[:300])
    steps_s = [answer["wall_s"] for answer in answers[NUM_WARM_UP:]]
    low, middle, high = quantiles(steps_s, n=4)
    predicted = predict(folder / "job.toml", case.arguments, job.run.device) if case.who == OURS else None
    return Measured(
        name=case.name,
        step_s=median(steps_s),
        spread=(high - low) / middle,
        peak_bytes=int(max(answer["peak_bytes"] for answer in answers)),
        losses=tuple(answer["loss"] for answer in answers),
        peak_step_s=peak_s(job, job.run.device),
        predicted_s=None if predicted is None else predicted.step_s,
        predicted_bytes=None if predicted is None else predicted.peak_bytes,
        took_s=time.monotonic() - started_s,
    )
