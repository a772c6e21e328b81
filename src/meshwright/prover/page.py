"""Composability page, generated from a proof: tested, untested and invalid combinations of features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.prover.features import AXES, CHOICES, PIPELINES, Combination, Feature, combination
from meshwright.prover.table import HEADERS, changes_text, notes, row_of, share_text
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.proof import Proof

_PACKAGES = ("meshwright", "torch", "python")


@dataclass(frozen=True)
class _Grid:
    """One table of the page: each row's feature with each column's."""

    title: str
    corner: str
    rows: Sequence[Feature]
    columns: Sequence[Feature]


_GRIDS = (
    _Grid("Axes", "axis", AXES, AXES),
    _Grid("Pipeline schedules and axes", "schedule", PIPELINES, [axis for axis in AXES if axis.name != "pp"]),
    _Grid("Choices and axes", "choice", CHOICES, AXES),
    _Grid("Choices and pipeline schedules", "choice", CHOICES, PIPELINES),
)


def matrix_page(proof: Proof, command: str) -> str:
    """Return the page in Markdown; `command` generates it."""
    parts = [_introduction(proof, command)]
    for grid in _GRIDS:
        rows = [[f"**{row.name}**", *(_mark(one) for one in _combinations(proof, row, grid))] for row in grid.rows]
        parts += [f"## {grid.title}\n", _table([grid.corner, *(column.name for column in grid.columns)], rows)]
    parts += ["## Invalid combinations\n", _impossible(proof)]
    parts += ["## Layouts of each pair of axes\n", _table(["pair", "layouts", "smallest", "worst"], _pairs(proof))]
    parts += ["## All layouts\n", _table(HEADERS, [_cells(row_of(one)) for one in proof.layouts])]
    parts.append("".join(f"- {line}\n" for line in notes(proof)))
    return "\n".join(parts)


def _introduction(proof: Proof, command: str) -> str:
    versions = ", ".join(f"{name} {proof.versions[name]}" for name in _PACKAGES if name in proof.versions)
    return f"""\
# Composability

Generated on {proof.date} by `{command}` ({versions}). Do not edit; run the command.

{len(proof.layouts)} layouts on local ranks (gloo) and one process trained the same small model for {proof.num_steps}
steps with the real trainer, in {proof.took_s / 60:.0f} minutes. Losses, the gradient of each parameter and the updated
weights were compared by name. A percentage is the largest difference over all layouts with both features, relative to
the tolerance for rounding; above 100% is an error. **wrong**: a layout failed. *untested*: valid, but in no layout of
the set. –: an [invalid combination](#invalid-combinations).

`{proof.job.model.source}`, reduced: {changes_text(proof)}.
"""


def _combinations(proof: Proof, row: Feature, grid: _Grid) -> Iterator[Combination]:
    for column in grid.columns:
        yield combination(proof.job, proof.layouts, *dict.fromkeys((row, column)))


def _mark(one: Combination) -> str:
    if one.worst is None:
        return "–" if one.impossible is not None else "*untested*"
    return _share(one) if one.worst.holds else "**wrong**"


def _share(one: Combination) -> str:
    worst = None if one.worst is None else one.worst.worst
    return "" if worst is None else share_text(worst)


def _impossible(proof: Proof) -> str:
    names: dict[str, set[str]] = {}
    for grid in _GRIDS:
        for one in (one for row in grid.rows for one in _combinations(proof, row, grid)):
            if one.impossible is not None:
                # Each pair of axes is in the table twice.
                pair = " with ".join(sorted(feature.name for feature in one.features))
                names.setdefault(one.impossible, set()).add(pair)
    lines = (f"- {'; '.join(sorted(pairs))}: {reason}\n" for reason, pairs in names.items())
    return "".join(lines) or "None.\n"


def _pairs(proof: Proof) -> Iterator[list[str]]:
    for pair in combinations(AXES, 2):
        one = combination(proof.job, proof.layouts, *pair)
        names = " x ".join(feature.name for feature in pair)
        smallest = min(one.proofs, key=lambda proof: proof.layout.num_ranks, default=None)
        text = one.impossible or "untested" if smallest is None else f"`{layout_text(smallest.layout)}`"
        yield [names, str(len(one.proofs)), text, _mark(one)]


def _cells(row: Sequence[str]) -> list[str]:
    layout, *others = row
    return [f"`{layout}`", *others]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
