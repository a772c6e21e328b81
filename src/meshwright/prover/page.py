"""The page that says what composes with what: generated from a proof, with what was not tested and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.prover.features import AXES, CHOICES, PIPELINES, Feature, Meeting, meeting
from meshwright.prover.table import HEADERS, changes_text, notes, row_of, share_text
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.proof import Proof

_PACKAGES = ("meshwright", "torch", "python")


@dataclass(frozen=True)
class _Grid:
    """One table of the page: every row's feature with every column's."""

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
    """Return the page in Markdown; `command` is what gives it again."""
    parts = [_introduction(proof, command)]
    for grid in _GRIDS:
        rows = [[f"**{row.name}**", *(_mark(one) for one in _meetings(proof, row, grid))] for row in grid.rows]
        parts += [f"## {grid.title}\n", _table([grid.corner, *(column.name for column in grid.columns)], rows)]
    parts += ["## What cannot meet, and why\n", _impossible(proof)]
    parts += ["## Where each pair of axes met\n", _table(["pair", "layouts", "the smallest", "worst"], _pairs(proof))]
    parts += ["## All layouts\n", _table(HEADERS, [_cells(row_of(one)) for one in proof.layouts])]
    parts.append("".join(f"- {line}\n" for line in notes(proof)))
    return "\n".join(parts)


def _introduction(proof: Proof, command: str) -> str:
    versions = ", ".join(f"{name} {proof.versions[name]}" for name in _PACKAGES if name in proof.versions)
    return f"""\
# What composes with what

Generated on {proof.date} by `{command}` ({versions}). Do not edit: run it again.

{len(proof.layouts)} layouts, each on local ranks of its own (gloo), trained the same small model as one process for
{proof.num_steps} steps, through the real trainer, in {proof.took_s / 60:.0f} minutes. Losses, the gradient of each
parameter and the updated weights were compared by name. A percentage is the worst of these differences over all layouts
in which the two met, as a share of what rounding explains: above 100% is a mistake. **wrong**: one did not hold.
*untested*: possible, but in no layout of the set. –: cannot meet, [why](#what-cannot-meet-and-why).

`{proof.job.model.source}` made small: {changes_text(proof)}.
"""


def _meetings(proof: Proof, row: Feature, grid: _Grid) -> Iterator[Meeting]:
    for column in grid.columns:
        yield meeting(proof.job, proof.layouts, *dict.fromkeys((row, column)))


def _mark(one: Meeting) -> str:
    if one.worst is None:
        return "–" if one.impossible is not None else "*untested*"
    return _share(one) if one.worst.holds else "**wrong**"


def _share(one: Meeting) -> str:
    worst = None if one.worst is None else one.worst.worst
    return "" if worst is None else share_text(worst)


def _impossible(proof: Proof) -> str:
    names: dict[str, set[str]] = {}
    for grid in _GRIDS:
        for one in (one for row in grid.rows for one in _meetings(proof, row, grid)):
            if one.impossible is not None:
                # A pair of axes stands in the table twice.
                pair = " with ".join(sorted(feature.name for feature in one.features))
                names.setdefault(one.impossible, set()).add(pair)
    lines = (f"- {'; '.join(sorted(pairs))}: {reason}\n" for reason, pairs in names.items())
    return "".join(lines) or "Everything can.\n"


def _pairs(proof: Proof) -> Iterator[list[str]]:
    for pair in combinations(AXES, 2):
        one = meeting(proof.job, proof.layouts, *pair)
        names = " x ".join(feature.name for feature in pair)
        smallest = min(one.proofs, key=lambda met: met.layout.num_ranks, default=None)
        text = one.impossible or "untested" if smallest is None else f"`{layout_text(smallest.layout)}`"
        yield [names, str(len(one.proofs)), text, _mark(one)]


def _cells(row: Sequence[str]) -> list[str]:
    layout, *others = row
    return [f"`{layout}`", *others]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
