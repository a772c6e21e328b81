"""Composability page, generated from a proof: tested, untested and invalid combinations of features."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from meshwright.prover.table import HEADERS, changes_text, notes, row_of, share_text
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.covering import COVERED_AXES
from meshwright.spec.layout.layout import SCHEDULES, Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.proof import LayoutProof, Proof


@dataclass(frozen=True, eq=False)
class Feature:
    """One axis, schedule or option of a layout."""

    name: str
    is_in: Callable[[Layout], bool]
    smallest: Mapping[str, Any]
    """Keys of the smallest layout that has it."""


def _axis(name: str) -> Feature:
    return Feature(name, lambda layout: getattr(layout, name) > 1, {name: 2})


def _choice(name: str, key: str, value: Any, **needs: Any) -> Feature:
    def is_in(layout: Layout) -> bool:
        return bool(getattr(layout, key) == value) and all(getattr(layout, need) > 1 for need in needs)

    return Feature(name, is_in, {key: value, **needs})


AXES = tuple(_axis(name) for name in COVERED_AXES)
"""The axes, each above 1."""

PIPELINES = tuple(_choice(name, "schedule", name, pp=2) for name in SCHEDULES)
"""The pipeline schedules."""

CHOICES = (
    *(_choice(f"cp by {method}", "cp_method", method, cp=2) for method in ("all-gather", "ring", "ulysses")),
    Feature("etp", lambda layout: layout.etp > 1, {"tp": 2, "etp": 2}),
    _choice("recompute selective", "activation_checkpoint", "selective"),
    _choice("recompute full", "activation_checkpoint", "full"),
    Feature(
        "compile (aot_eager)", lambda layout: layout.compile is True, {"compile": True, "compile_backend": "aot_eager"}
    ),
    _choice("reshard always", "reshard_after_forward", "always"),
    _choice("reshard never", "reshard_after_forward", "never"),
    Feature(
        "reshard in groups",
        lambda layout: isinstance(layout.reshard_after_forward, int),
        {"dp_shard": 4, "reshard_after_forward": 2},
    ),
    _choice("CPU offload", "cpu_offload", True),
    Feature(
        "reduce each microbatch",
        lambda layout: layout.reduces_each_microbatch,
        {"gradient_sync": "microbatch"},
    ),
    Feature(
        "reduce once a step",
        lambda layout: layout.fsdp > 1 and not layout.reduces_each_microbatch,
        {"dp_shard": 2, "gradient_sync": "step"},
    ),
)
"""All other options of a layout that an error could make change numerics."""


@dataclass(frozen=True)
class Combination:
    """Two features, or one, and the proofs of layouts that have them."""

    features: tuple[Feature, ...]
    proofs: Sequence[LayoutProof]
    impossible: str | None
    """Why no layout of the model can have both; None if one can."""

    @property
    def worst(self) -> LayoutProof | None:
        """Return the proof closest to its bar, or one that failed; None without proofs."""
        return max(self.proofs, key=_badness, default=None)


def _badness(one: LayoutProof) -> tuple[bool, float]:
    return not one.holds, one.worst.share if one.worst is not None else 0.0


def combination(job: Job, proofs: Sequence[LayoutProof], *features: Feature) -> Combination:
    """Return the proofs of `job` that cover `features`."""
    covered = [one for one in proofs if all(feature.is_in(one.layout) for feature in features)]
    return Combination(features, covered, None if covered else _invalid_reason(job, features))


def _invalid_reason(job: Job, features: Sequence[Feature]) -> str | None:
    """Return why the smallest layout with all `features` is invalid, or None."""
    keys: dict[str, Any] = {}
    for feature in features:
        for key, value in feature.smallest.items():
            keys[key] = max(value, keys.get(key, value)) if isinstance(value, int) else value
    # Experts, and groups of ranks, need ranks of other axes.
    wider = {"dp_shard": 2 * keys.get("dp_shard", 1)}
    problems = [
        split_problems(Layout(**attempt), resolve_architecture(job.model), job.train.seq_len)
        for attempt in (keys, keys | wider)
    ]
    return None if any(not found for found in problems) else problems[0][0]


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


_BUFFERS = {
    False: "so were the persistent\nbuffers of each rank after the last step, such as biases of routers: one that "
    "differs is an error",
    True: "persistent buffers were not, since in bfloat16 a token may go to another expert",
}
"""What is said of persistent buffers, by whether the proof is in bfloat16."""


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
weights were compared by name; {_BUFFERS[proof.precision == "mixed"]}.
A percentage is the largest difference over all layouts with both features, relative to the tolerance for rounding;
above 100% is an error. **wrong**: a layout failed. *untested*: valid, but in no layout of the set. –: an [invalid
combination](#invalid-combinations).

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
