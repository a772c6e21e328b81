"""python -m validation.chaos_matrix: faults x points x victims x layouts x storage damage, and controls that must fail.

The short form gives each layout a third of the kinds, each at another point, so that all layouts together have each
kind at two points or more; `--long` gives each layout every kind, and adds 200 random faults in ten runs. A run that
fails is repeated with fewer faults until none can be left out. Whenever one run has ended, it is kept in a JSON file,
to which later commands add, and docs/chaos_matrix.md is written. Exit code 1 if a run of ours fails, or if a control
passes.

Expected, written before the first run: all of ours survive, and all controls fail, but for their sound counterparts.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import meshwright as mw
from benchmarks.peers.environments import python_of
from validation.chaos_cases import (
    LAUNCHER_CASES,
    LAYOUTS,
    LayoutCase,
    kill_launcher,
    num_steps_of,
    planned_faults,
)
from validation.chaos_controls import CONTROLS
from validation.chaos_page import ControlResult, MatrixResults, page_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "chaos_matrix.md"
_EVERY_KIND, _EVERY_THIRD = 1, 3
_RANDOM_RUNS, _RANDOM_STEPS = 10, 60
PARTS = ("layouts", "launcher", "controls", "random")


@click.command()
@click.option("--long", "is_long", is_flag=True, help="Every kind on every layout, and 200 random faults.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; default: all of the form.")
@click.option("--layout", "names", multiple=True, type=click.Choice([one.name for one in LAYOUTS]), help="Only these.")
@click.option(
    "--random", "num_random", type=int, help="Random faults in all; default: 200 in the long form, else none."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--environments", default=".peers", type=click.Path(path_type=Path), show_default=True)
@click.option("--kept", default=".chaos/matrix.json", type=click.Path(path_type=Path), show_default=True)
@click.option("--out", default=PAGE, type=click.Path(path_type=Path), show_default=True)
def main(
    is_long: bool,
    parts: Sequence[str],
    names: Sequence[str],
    num_random: int | None,
    seed: int,
    environments: Path,
    kept: Path,
    out: Path,
) -> None:
    """Run the matrix and write the page."""
    num_random = (200 if is_long else 0) if num_random is None else num_random
    layouts = [one for one in LAYOUTS if not names or one.name in names]
    matrix = _Matrix(layouts, _EVERY_KIND if is_long else _EVERY_THIRD, num_random, seed, environments.absolute())
    results = MatrixResults.kept(kept, _machine())
    kept.parent.mkdir(parents=True, exist_ok=True)
    for part in parts or [part for part in PARTS if part != "random" or num_random]:
        for done in matrix.run(part, results):
            kept.write_text(results.to_json(), encoding="utf-8")
            out.write_text(page_of(results), encoding="utf-8")
            print(f"{part}: {done}", file=sys.stderr, flush=True)
    Console(width=130).print(_table_of(results))
    print("\n".join(results.failures) or "all as they must be", f"\n{out}")
    sys.exit(1 if results.failures else 0)


@dataclass(frozen=True)
class _Matrix:
    """What is to be run."""

    layouts: Sequence[LayoutCase]
    every: int
    """Of so many kinds each layout has one."""
    num_random: int
    seed: int
    environments: Path

    def run(self, part: str, results: MatrixResults) -> Iterator[str]:
        """Run one part, and yield the name of each thing that is done."""
        parts = {"layouts": self._layouts, "launcher": self._launchers, "controls": self._controls}
        return parts.get(part, self._random)(results)

    def _layouts(self, results: MatrixResults) -> Iterator[str]:
        for layout in self.layouts:
            faults = planned_faults(LAYOUTS.index(layout), layout.num_ranks, self.every)
            keys = (*layout.overrides, f"train.steps={num_steps_of(faults)}")
            results.layouts[layout.name] = mw.chaos(
                layout.job, *keys, faults=faults, ranks=layout.num_ranks, shrink=True
            )
            yield layout.name

    def _launchers(self, results: MatrixResults) -> Iterator[str]:
        for name, before, after in LAUNCHER_CASES:
            with tempfile.TemporaryDirectory() as folder:
                results.launchers[name] = kill_launcher(before, after, Path(folder))
            yield name

    def _controls(self, results: MatrixResults) -> Iterator[str]:
        python = python_of("recovery", self.environments)
        for control in CONTROLS:
            with tempfile.TemporaryDirectory() as folder:
                bad = control.bad(python, Path(folder) / "bad")
                sound = control.sound(python, Path(folder) / "sound")
            results.controls[control.name] = ControlResult(
                flaw=control.flaw, bad=bad, sound=sound, is_by_chance=control.is_by_chance
            )
            yield control.name

    def _random(self, results: MatrixResults) -> Iterator[str]:
        """Spread random faults over runs, one layout after the other; seeds count up."""
        num_runs = min(_RANDOM_RUNS, self.num_random)
        for number in range(num_runs):
            layout = self.layouts[number % len(self.layouts)]
            num_faults = self.num_random // num_runs + (number < self.num_random % num_runs)
            keys = (*layout.overrides, f"train.steps={max(_RANDOM_STEPS, 2 * num_faults)}")
            seed = self.seed + number
            name = f"{num_faults} random, seed {seed}, {layout.name}"
            results.random[name] = mw.chaos(
                layout.job, *keys, random=num_faults, seed=seed, ranks=layout.num_ranks, shrink=True
            )
            yield name


def _machine() -> str:
    day = datetime.datetime.now(tz=datetime.UTC).date()
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    cores = f"{os.cpu_count()} {platform.machine()} cores"
    return f"Last run: {day}, torch {torch.__version__.partition('+')[0]}, gloo, {cores}, {load}."


def _table_of(results: MatrixResults) -> Table:
    table = Table("run", "faults", "attempts", "verdict")
    for name, one in (*results.layouts.items(), *results.random.items()):
        table.add_row(name, str(len(one.outcomes)), str(one.num_attempts), "survived" if one.holds else "failed")
    for name, launcher in results.launchers.items():
        table.add_row(name, "1", "2", "survived" if launcher.holds else "failed")
    for name, control in results.controls.items():
        bad = control.bad
        table.add_row(f"control: {name}", str(len(bad.outcomes)), str(bad.num_attempts), "" if bad.holds else "fails")
    return table


if __name__ == "__main__":
    main()
