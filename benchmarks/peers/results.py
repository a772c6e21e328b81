"""Results: what rounds measured, kept in one JSON file; and the rows that a table shows of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

LOSS_TOLERANCE = 2e-4
"""Relative. Losses of the same steps in float32 differ by the order of sums, and more with each update."""


@dataclass
class Results:
    """All complete rounds, of the same ways, task and machine."""

    setting: dict[str, Any]
    """What must be equal for a round to join the others."""
    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    """By way: wall seconds of the slower rank, CPU seconds of both."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By way: the mean loss of each step, from the first on."""
    peaks: dict[str, float] = field(default_factory=dict)
    """By way: the largest resident memory of a rank, bytes."""
    failures: dict[str, str] = field(default_factory=dict)
    """By way: why it has no row."""

    @classmethod
    def kept(cls, path: Path, setting: dict[str, Any]) -> Results:
        """Return the results in `path`, if they are of the same setting, else new ones."""
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        same = found.get("setting") == json.loads(json.dumps(setting))
        return cls(**found) if same else cls(setting)

    def write(self, path: Path) -> None:
        """Write `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(vars(self), indent=1), encoding="utf-8")
        os.replace(partial, path)


@dataclass(frozen=True)
class Row:
    """One way's figures."""

    name: str
    step_s: float
    """Median over rounds."""
    spread: float
    """Width of the middle half of its steps, as a share of the median."""
    cpu_s: float
    """Median of the CPU seconds of both ranks."""
    last_loss: float
    loss_difference: float
    """Largest relative difference of a step's loss from the reference's."""
    peak_bytes: float

    @property
    def is_comparable(self) -> bool:
        """Return whether it did the same work: all its losses are the reference's, within the tolerance."""
        return self.loss_difference <= LOSS_TOLERANCE


def rows_of(results: Results, reference: str) -> list[Row]:
    """Return the row of each way that was in all rounds; its losses are compared with those of `reference`."""
    return [_row(results, name, results.losses[reference]) for name in results.rounds[0]] if results.rounds else []


def _row(results: Results, name: str, expected: list[float]) -> Row:
    walls, cpus = zip(*(one[name] for one in results.rounds), strict=True)
    low, _, high = quantiles(walls, n=4) if len(walls) > 1 else (0.0, 0.0, 0.0)
    losses = results.losses[name]
    differences = [abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=False)]
    # NaN is not comparable: max() would drop it.
    worst = float("nan") if any(one != one for one in differences) else max(differences)
    step_s = median(walls)
    return Row(name, step_s, (high - low) / step_s, median(cpus), losses[-1], worst, results.peaks[name])


def paired_ratio(results: Results, name: str, other: str, index: int) -> float:
    """Return how many times as fast `name` is as `other`: the median over rounds; index 0 is wall, 1 is CPU time."""
    return median(one[other][index] / one[name][index] for one in results.rounds)
