"""recipe_of: what a vendor's published recipe sets beyond the columns of its table of runs (recipes.csv)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.evaluation.dataset.row import RunRow

_DEVICES = (("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300"), ("B200", "b200"), ("H100", "h100-sxm"))
_SAME = {"pp": "pp", "ep": "ep", "microbatch_size": "micro_batch", "global_batch_size": "global_batch"}
"""Columns of a recipe and of a run that distinguish the variants of one recipe."""


@dataclass(frozen=True)
class _Recipe:
    """One line of recipes.csv."""

    key: tuple[str, str, str]
    """Model, device, precision."""
    release: float
    variant: dict[str, int]
    sets: dict[str, Any]


def recipe_of(row: RunRow) -> dict[str, Any]:
    """Return the fields of Stack that the row's recipe sets: the newest not after its release; empty without one."""
    device = next((name for text, name in _DEVICES if text in row.text("gpu").upper()), "")
    release = row.number("release") or 0.0
    known = [one for one in _recipes() if one.key == (row.text("model_family"), device, row.precision)]
    if not known:
        return {}
    # Recipes before the first release that is known were like it.
    newest = max(release, min(one.release for one in known))
    usable = [one for one in known if one.release <= newest]
    wanted = {name: row.count(column) or 1 for name, column in _SAME.items()}

    def likeness(one: _Recipe) -> tuple[int, float]:
        return sum(one.variant[name] == wanted[name] for name in wanted), one.release

    return max(usable, key=likeness).sets


@lru_cache
def _recipes() -> list[_Recipe]:
    text = (files("meshwright.evaluation.dataset") / "recipes.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_recipe(cells) for cells in csv.DictReader(lines)]


def _recipe(cells: dict[str, str]) -> _Recipe:
    flags = ("ep_overlap", "fused_experts", "low_precision_attention")
    sets: dict[str, Any] = {name: cells[name] == "1" for name in flags}
    sets |= {"cuda_graphs": cells["cuda_graphs"], "dispatcher": cells["dispatcher"]}
    return _Recipe(
        key=(cells["model"], cells["device"], cells["precision"]),
        release=float(cells["release"]),
        variant={name: int(cells[name]) for name in _SAME},
        sets=sets,
    )
