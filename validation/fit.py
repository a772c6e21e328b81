"""python -m validation.fit: fits all constants on the published runs and writes them where formulas read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import tomlkit

import meshwright.cost
import meshwright.evaluation.backtest
from meshwright.cost.layout_table import Floats
from meshwright.cost.stack_factors import GENERIC, stacks
from meshwright.evaluation.backtest.left_out import (
    fits_without_stacks,
    interval_half_width,
    log_predicted_by_folds,
    log_predicted_unknown,
    log_predicted_unseen,
    unseen_half_width,
)
from meshwright.evaluation.backtest.predict_runs import fit_null_model, load_runs
from meshwright.evaluation.fitting.fit import Fit, fit
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS, TimedRuns, is_timed

PUBLISHED_RUNS = Path(__file__).with_name("published_runs.csv")
_NULL_MODEL_HEAD = (
    "# Median share of the dense peak that model FLOPs reach, by device and precision; written by validation.fit.\n"
)


@dataclass(frozen=True)
class Change:
    """One number in a file."""

    file: Path
    table: str | None
    key: str
    value: float


def applied(text: str, changes: Iterable[Change]) -> tuple[str, list[str]]:
    """Return the TOML `text` with the numbers, and a line for each that is another one now."""
    document, lines = tomlkit.parse(text), []
    for change in changes:
        table = document if change.table is None else document[change.table]
        old = table.get(change.key)
        if old != change.value:
            lines.append(f"{change.table or change.file.stem} {change.key}: {old} -> {change.value}")
            table[change.key] = change.value
    return tomlkit.dumps(document), lines


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would change, and write nothing.")
@click.option(
    "--keep-intervals", is_flag=True, help="Leave each stack's relative_error, which takes minutes, as it is."
)
def main(dry_run: bool, keep_intervals: bool) -> None:
    """Fit the constants of the cost formulas on validation/published_runs.csv."""
    runs = TimedRuns([run for run in load_runs(PUBLISHED_RUNS) if is_timed(run)])
    cost = Path(meshwright.cost.__file__).parent
    changes = list(changes_of_fit(cost, runs, fit(runs, np.ones(len(runs), bool))))
    if not keep_intervals:
        changes += changes_of_intervals(cost, runs)
    for file in sorted({change.file for change in changes}):
        text, lines = applied(file.read_text(encoding="utf-8"), [change for change in changes if change.file == file])
        for line in lines:
            click.echo(line)
        if not dry_run:
            file.write_text(text, encoding="utf-8")
    if not dry_run:
        _write_null_model(runs)


def changes_of_fit(cost: Path, runs: TimedRuns, found: Fit) -> Iterator[Change]:
    """Yield the constants, and what each stack's file says of its own."""
    for name, value in found.constants.items():
        yield Change(cost / "constants.toml", name, "value", _rounded(value))
    for stack in set(runs.stacks) & set(stacks()):
        file = cost / "stacks" / f"{stack}.toml"
        for name, value in zip(MULTIPLIERS, found.multipliers[stack], strict=True):
            yield Change(file, None, name, _rounded(value))
        yield Change(file, None, "num_runs", int((runs.stack == stack).sum()))


def changes_of_intervals(cost: Path, runs: TimedRuns) -> Iterator[Change]:
    """Yield each stack's half width, from runs left out of the fit.

    A stack without runs has that of an unseen one, and the generic stack that of one of which nothing is known.
    """
    off = _off(runs, log_predicted_by_folds(runs))
    fits = fits_without_stacks(runs)
    unseen = unseen_half_width(_off(runs, log_predicted_unseen(runs, fits)))
    unknown = unseen_half_width(_off(runs, log_predicted_unknown(runs, fits)))
    for stack in stacks():
        own = off[runs.stack == stack]
        width = unknown if stack == GENERIC else interval_half_width(own, off) if len(own) else unseen
        yield Change(cost / "stacks" / f"{stack}.toml", None, "relative_error", round(width, 3))


def _off(runs: TimedRuns, log_predicted_s: Floats) -> Floats:
    return np.abs(np.expm1(runs.log_measured_s - log_predicted_s))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _write_null_model(runs: TimedRuns) -> None:
    setups = [run.setup for run in runs.runs if run.setup is not None]
    shares = fit_null_model(setups, np.exp(runs.log_measured_s).tolist())
    file = Path(meshwright.evaluation.backtest.__file__).with_name("null_model.toml")
    file.write_text(_NULL_MODEL_HEAD + tomlkit.dumps(shares), encoding="utf-8")


if __name__ == "__main__":
    main()
