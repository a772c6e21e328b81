"""python -m validation.gpu_runs: runs of our own on a GPU next to what is predicted of them.

`gpu_runs.csv` holds the median step and the most that torch allocated in runs of `meshwright train` on two H200 (torch
2.11.0, CUDA 13.0, 16 cores of a virtual machine each, 2026-11-26), where a profile was read with what it says of the
step's parts. A profile costs the host time of its own. Two constants come from two of the rows: matmul_own.hopper and
attention_backward.cudnn, from the steps of 4 x 8192 tokens that have parts; nothing is fitted on the others.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.spec.step.simulation_report import Outcome

CLUSTER = "h200-efa:1"
_ROOT = Path(__file__).resolve().parent
_PARTS = ("compute_s", "cpu_bound_s", "optimizer_s")


def main() -> None:
    """Print both tables."""
    rows = list(csv.DictReader((_ROOT / "gpu_runs.csv").read_text(encoding="utf-8").splitlines()))
    outcomes = [_outcome(row) for row in rows]
    console = Console(width=110)
    console.print(_steps(rows, outcomes))
    console.print(_parts(rows, outcomes))


def _outcome(row: dict[str, str]) -> Outcome:
    job = _ROOT.parent / "examples" / f"{row['job']}.toml"
    run = mw.simulate(str(job), *row["overrides"].split(), "layout.dp_shard=1", cluster=CLUSTER).run
    assert run.outcome is not None
    return run.outcome


def _steps(rows: list[dict[str, str]], outcomes: list[Outcome]) -> Table:
    names = ("run", "step, ms: measured", "formulas", "simulated", "memory, GB: measured", "formulas", "simulated")
    table = Table(*names, title=f"predicted for {CLUSTER}, off by")
    errors: list[list[float]] = []
    for row, outcome in zip(rows, outcomes, strict=True):
        assert outcome.predicted is not None
        step_s, num_bytes = float(row["step_s"]), int(row["allocated_bytes"])
        steps = (outcome.predicted.step.total_s, outcome.step_s)
        peaks = (outcome.predicted.memory.allocated_bytes, max(rank.allocated_bytes for rank in outcome.memory))
        off = [*(one / step_s - 1 for one in steps), *(one / num_bytes - 1 for one in peaks)]
        errors.append([abs(one) for one in off])
        words = [f"{one:+.1%}" for one in off[:2]] + [f"{one:+.2%}" for one in off[2:]]
        table.add_row(row["name"], f"{step_s * 1e3:.0f}", *words[:2], f"{num_bytes / 1e9:.2f}", *words[2:])
    typical = [median(column) for column in zip(*errors, strict=True)]
    shown = [f"{one:.1%}" for one in typical[:2]], [f"{one:.2%}" for one in typical[2:]]
    table.add_row("median of sizes", "", *shown[0], "", *shown[1])
    return table


def _parts(rows: list[dict[str, str]], outcomes: list[Outcome]) -> Table:
    table = Table("run", *(f"{part.removesuffix('_s')}, ms: measured, formulas" for part in _PARTS), title="parts")
    for row, outcome in zip(rows, outcomes, strict=True):
        if row["compute_s"]:
            table.add_row(row["name"], *_pairs(row, outcome))
    return table


def _pairs(row: dict[str, str], outcome: Outcome) -> Iterator[str]:
    assert outcome.predicted_parts is not None
    for part in _PARTS:
        yield f"{float(row[part]) * 1e3:.1f}, {getattr(outcome.predicted_parts, part) * 1e3:.1f}"


if __name__ == "__main__":
    main()
