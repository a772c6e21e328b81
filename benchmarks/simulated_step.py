"""python -m benchmarks.simulated_step: is what `simulate` says of a traced step what `train` takes on this machine?

Calibrates this machine (or takes what is in --catalogue), runs each case dry with `meshwright simulate` on the
calibrated cluster, which also prints the planner's prediction, trains each case for some steps with `meshwright
train`, all cases in turn, and compares with the best run's median. No case has a shape that calibrate watches, and but
for sharing (FSDP) no layout that it watches. Exit code 1 if the median error is more than 10 % or one more than 20 %.

Expected, written before the first run of this script: median 8 %, worst 18 %. The seconds of threads (without waits) of
the same cases had been seen by then, and in their view two choices were made: a line's start holds only a share of what
lies between watched operators, and operators met only in small tensors take the usual rate. That FSDP's collectives
take more than bare ones was found after shared ranks had come out 16.6 % too fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.calibrated_step import Shape, measured_s, run_meshwright
from meshwright.hardware.catalogue import CATALOGUE_VARIABLE
from meshwright.spec.step.simulation_report import Outcome, SimulationReport
from meshwright.units import MiB

MEDIAN_BAR, WORST_BAR = 0.10, 0.20
_WIDER = ("model.source=llama-15m", "train.global_batch_size=8")
_LONGER = ("train.seq_len=1024", "layout.microbatch_size=1")
CASES = (
    Shape("1 rank", 1, ("layout.dp_shard=1",)),
    Shape("2 ranks share the state", 2, ("layout.dp_shard=2",)),
    Shape("tensor parallel", 2, ("layout.dp_shard=1", "layout.tp=2")),
    Shape("two stages, 1F1B", 2, ("layout.dp_shard=1", "layout.pp=2")),
    Shape("context parallel", 2, ("layout.dp_shard=1", "layout.cp=2")),
    Shape("shared, recomputed", 2, ("layout.dp_shard=2", "layout.activation_checkpoint=full")),
    Shape("shared, wider", 2, ("layout.dp_shard=2", *_WIDER)),
    Shape("shared, 1024 tokens", 2, ("layout.dp_shard=2", *_LONGER)),
    Shape("tensor parallel, wider", 2, ("layout.dp_shard=1", "layout.tp=2", *_WIDER)),
    Shape("two stages, 1024 tokens", 2, ("layout.dp_shard=1", "layout.pp=2", *_LONGER)),
)


def main() -> int:
    """Return the exit code: 0 if the errors are within the bars."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_step", description=__doc__)
    parser.add_argument("--catalogue", type=Path, help="folder of a calibration to take; default: calibrate again")
    parser.add_argument("--seconds", type=float, default=60.0, help="of calibrating")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each case; the one with the lowest median counts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CATALOGUE_VARIABLE] = str(given.catalogue or folder)
        if given.catalogue is None:
            run_meshwright("calibrate", "--device", "cpu", "--out", folder, "--seconds", f"{given.seconds:g}")
        # First, so that the prediction cannot depend on the measurement.
        outcomes = [_outcome(case) for case in CASES]
        # All cases in turn, so that a busy minute does not meet all runs of one.
        rounds = [
            [measured_s(case, given.steps, Path(folder) / f"{run}-{index}") for index, case in enumerate(CASES)]
            for run in range(given.runs)
        ]
    return _report(outcomes, [min(times) for times in zip(*rounds, strict=True)])


def _outcome(case: Shape) -> Outcome:
    text = run_meshwright("simulate", *case.words(), "--cluster", f"cpu-local:{case.num_ranks}", "--no-cache", "--json")
    outcome = SimulationReport.from_json(text).outcome
    assert outcome is not None
    print(f"{case.title}: simulated {outcome.step_s * 1e3:.0f} ms", file=sys.stderr, flush=True)
    return outcome


def _report(outcomes: list[Outcome], measured: list[float]) -> int:
    table = Table(
        "case", "formula, ms", "off by", "simulated, ms", "off by", "measured, ms", "formula, MiB", "traced, MiB"
    )
    errors = [outcome.step_s / found - 1 for outcome, found in zip(outcomes, measured, strict=True)]
    for case, outcome, found, error in zip(CASES, outcomes, measured, errors, strict=True):
        assert outcome.predicted is not None
        formula_s = outcome.predicted.step.total_s
        predicted = outcome.predicted.memory
        assert predicted is not None
        assert outcome.fullest is not None
        table.add_row(
            case.title,
            f"{formula_s * 1e3:.0f}",
            f"{formula_s / found - 1:+.1%}",
            f"{outcome.step_s * 1e3:.0f}",
            f"{error:+.1%}",
            f"{found * 1e3:.0f}",
            f"{predicted.allocated_bytes / MiB:.1f}",
            f"{outcome.fullest.allocated_bytes / MiB:.1f}",
        )
    median, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
    console = Console(width=140)
    console.print(table)
    console.print(f"median error {median:.1%} (bar {MEDIAN_BAR:.0%}), worst {worst:.1%} (bar {WORST_BAR:.0%})")
    console.print(f"load of the last minute: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    return 0 if median <= MEDIAN_BAR and worst <= WORST_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
