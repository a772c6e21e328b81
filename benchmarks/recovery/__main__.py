"""python -m benchmarks.recovery: what SIGKILL of one of two ranks costs, next to torchrun, torchft and NVRx.

All train one small network on the same samples with AdamW on two gloo ranks, 0.1 s a step, and rank 1 kills itself in
backward. Checkpoints every 5 steps, but for torchft, whose groups take their weights from a live one. One run with all
kills each; NVRx continues with one rank less, so that each of its kills has a run of its own. Times are from the kill
until any rank has finished a step, and until the killed rank has; then the steps done again, and whether the run ends
with the parameters and samples of the same program without kills. Peers have an environment that the command makes.

Expected, written before the first run: ours and torchrun with a prefix 2 to 3 s, 2 steps again, equal; torchrun as it
is fails at most restarts; torchft 1 to 2 s for the survivor, no step again, not equal, since a group trains alone; NVRx
2 s, 2 steps again, not equal, and the killed rank stays dead.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import meshwright as mw
from benchmarks.peers.environments import python_of, versions_of
from benchmarks.recovery.peer_runs import (
    NUM_RANKS,
    Way,
    nvrx,
    report,
    torchft,
    torchft_wrapper,
    torchrun,
    torchrun_with_prefix,
)
from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.spec.fault import Fault
from meshwright.spec.run.chaos_report import ChaosReport
from meshwright.spec.run.run import Run

JOB = Path(__file__).parent / "ranks" / "job.toml"
FIRST_KILL = 8
PEERS: dict[str, Way] = {
    "torchrun --max-restarts": torchrun,
    "torchrun, own store prefix": torchrun_with_prefix,
    "torchft": torchft,
    "torchft, its DDP": torchft_wrapper,
    "NVRx in-process": nvrx,
}
OURS = "meshwright"
_ONE_KILL_A_RUN = ("NVRx in-process",)


@click.command()
@click.option("--kills", default=5, show_default=True)
@click.option("--every", default=50, show_default=True, help="Steps between kills: more than a restart takes.")
@click.option("--way", "names", multiple=True, type=click.Choice([OURS, *PEERS]), default=[OURS, *PEERS])
@click.option("--environments", default=".peers", type=click.Path(path_type=Path), show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="A new folder for the runs.")
def main(kills: int, every: int, names: tuple[str, ...], environments: Path, keep: Path | None) -> None:
    """Measure, and print the table."""
    steps = [FIRST_KILL + every * number for number in range(kills)]
    python = python_of("recovery", environments.absolute())
    table = Table("way", "next step, s", "of the killed rank, s", "steps again", "kills survived", "bits and samples")
    with tempfile.TemporaryDirectory() as name:
        for way in names:
            table.add_row(
                way, *row_of(way, python, Path(name) / way.partition(" ")[0] / str(len(table.rows)), steps, every)
            )
        if keep is not None:
            shutil.copytree(name, keep)
    Console(width=130).print(table)
    found = versions_of(python, ("torch", "torchft", "nvidia-resiliency-ext"))
    print("median (worst); " + ", ".join(f"{package} {text}" for package, text in found.items()))
    print(f"load average of the last minute at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def row_of(way: str, python: Path, folder: Path, steps: list[int], every: int) -> list[str]:
    """Return the cells of one way, after kills in `steps`."""
    planned = [[step] for step in steps] if way in _ONE_KILL_A_RUN else [steps]
    reports, next_s = [], []
    for number, kill_steps in enumerate(planned):
        found = measured(way, python, folder / str(number), kill_steps, kill_steps[-1] + every)
        reports.append(found)
        next_s += times_to_next_step(found, Run(folder / str(number) / ("with-faults" if way == OURS else "with")))
    outcomes = [one for each in reports for one in each.outcomes]
    problems = {problem for each in reports for problem in each.problems}
    return [
        spread(next_s),
        spread([one.recovered_after_s for one in outcomes if one.recovered_after_s is not None]),
        steps_again([one.lost_steps for one in outcomes if one.lost_steps is not None]),
        f"{sum(len(each.outcomes) for each in reports if not each.exit_code)} of {len(steps)}",
        "equal" if not problems else "; ".join(sorted(problems)),
    ]


def measured(way: str, python: Path, folder: Path, kill_steps: list[int], num_steps: int) -> ChaosReport:
    """Return how a run under these kills compares with one without."""
    faults = [Fault(kind="crash", rank=NUM_RANKS - 1, step=step, phase="backward") for step in kill_steps]
    if way == OURS:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return mw.chaos(JOB, f"train.steps={num_steps}", faults=faults, ranks=NUM_RANKS, keep=folder)
    return report(PEERS[way], python, folder, faults, num_steps)


def times_to_next_step(found: ChaosReport, run: Run) -> list[float]:
    """Return for each kill the seconds until any rank had finished a step."""
    ends_s = sorted(entry.time_s for rank in range(NUM_RANKS) for entry in read_ledger(run.ledger(rank)))
    kills_s = [one.injection.time_s for one in found.outcomes if one.injection is not None]
    after = [[end_s for end_s in ends_s if end_s > kill_s] for kill_s in kills_s]
    return [ends[0] - kill_s for ends, kill_s in zip(after, kills_s, strict=True) if ends]


def steps_again(lost: list[int]) -> str:
    """Return how many finished steps the killed rank did again; negative ones are steps that it never did."""
    if any(steps < 0 for steps in lost):
        return f"none; {spread([-float(steps) for steps in lost], digits=0)} missed"
    return spread([float(steps) for steps in lost], digits=0)


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median and the worst."""
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})" if values else "-"


if __name__ == "__main__":
    main()
