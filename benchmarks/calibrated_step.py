"""python -m benchmarks.calibrated_step: is what `plan` predicts after `calibrate` what `train` then takes?

Calibrates this machine (or takes what is in --catalogue), asks `meshwright plan --json` for the step of each shape,
trains each for some steps with `meshwright train`, and compares. Exit code 1 if a shape misses the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

BAR = 0.15
_NUM_WARM_UP = 5
_ROOT = Path(__file__).resolve().parent.parent
JOB = str(_ROOT / "examples" / "tiny.toml")


@dataclass(frozen=True)
class Shape:
    """A job to train on this machine."""

    title: str
    num_ranks: int
    overrides: tuple[str, ...]

    def words(self) -> tuple[str, ...]:
        """Return the job and what is changed in it; every degree is said, so that plan judges this very layout."""
        return (JOB, *self.overrides)


SHAPES = (
    Shape("the demo job, 2 ranks share the state", 2, ("layout.dp_shard=2",)),
    Shape("1 rank", 1, ("layout.dp_shard=1",)),
    Shape("2 ranks, tensor parallel", 2, ("layout.dp_shard=1", "layout.tp=2")),
    Shape("2 ranks, two stages", 2, ("layout.dp_shard=1", "layout.pp=2")),
    Shape("2 ranks, wider: llama-15m", 2, ("layout.dp_shard=2", "model.source=llama-15m", "train.global_batch_size=8")),
    Shape("2 ranks, 1024 tokens", 2, ("layout.dp_shard=2", "train.seq_len=1024", "layout.microbatch_size=1")),
)


def main() -> int:
    """Return the exit code: 0 if every shape's step is within the bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrated_step", description=__doc__)
    parser.add_argument("--catalogue", type=Path, help="folder of a calibration to take; default: calibrate again")
    parser.add_argument("--seconds", type=float, default=60.0, help="of calibrating")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each shape; the one with the lowest median counts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        catalogue = given.catalogue or Path(folder)
        os.environ["MESHWRIGHT_CATALOGUE"] = str(catalogue)
        if given.catalogue is None:
            run_meshwright("calibrate", "--out", folder, "--seconds", f"{given.seconds:g}")
        # First, so that the prediction cannot depend on the measurement.
        predicted_s = [_predicted_s(shape) for shape in SHAPES]
        print("predicted, ms:", *(f"{seconds * 1e3:.0f}" for seconds in predicted_s), file=sys.stderr, flush=True)
        # All shapes in turn, so that a busy minute does not meet all runs of one.
        rounds = [
            [measured_s(shape, given.steps, Path(folder) / f"{run}-{index}") for index, shape in enumerate(SHAPES)]
            for run in range(given.runs)
        ]
    return _report(predicted_s, [list(times) for times in zip(*rounds, strict=True)])


def _predicted_s(shape: Shape) -> float:
    text = run_meshwright("plan", *shape.words(), "--cluster", f"local:{shape.num_ranks}", "--json")
    step: dict[str, float] = json.loads(text)["given"]["estimate"]["step"]
    return sum(step.values())


def measured_s(shape: Shape, num_steps: int, folder: Path) -> float:
    """Return the median step of a run, the first few left out."""
    median_s = statistics.median(row["step_ms"] for row in trained(shape, num_steps, folder)) / 1000
    print(f"{shape.title}: {median_s * 1e3:.0f} ms, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return median_s


def trained(shape: Shape, num_steps: int, folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps, the first few left out."""
    run_meshwright(
        "train",
        *shape.words(),
        *(f"train.steps={num_steps}", "train.validation_interval=1000", "checkpoint.interval=1000"),
        *("optimizer.warmup_steps=2", f"run.dir={folder}", "--ranks", str(shape.num_ranks)),
    )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][_NUM_WARM_UP:]


def _report(predicted_s: list[float], measured_s: list[list[float]]) -> int:
    table = Table("shape", "predicted, ms", "measured, ms", "of runs, ms", "off by")
    is_met = True
    for shape, expected, runs in zip(SHAPES, predicted_s, measured_s, strict=True):
        error = expected / min(runs) - 1
        is_met &= abs(error) <= BAR
        table.add_row(
            shape.title,
            f"{expected * 1e3:.0f}",
            f"{min(runs) * 1e3:.0f}",
            " ".join(f"{run * 1e3:.0f}" for run in runs),
            f"{error:+.0%}" + ("" if abs(error) <= BAR else f", more than {BAR:.0%}"),
        )
    console = Console()
    console.print(table)
    console.print(f"load of the last minute: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    return 0 if is_met else 1


def run_meshwright(*words: str) -> str:
    """Return what `meshwright` prints, each rank on one thread; ends the program where it fails."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
