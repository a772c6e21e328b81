"""stack_of: the software of a measured run: the stack that its row names, corrected by what its columns say.

A vendor's published recipe sets what the columns of its table of runs do not (recipes.csv). What software without
measured runs probably does is inferred from the row: where it names a framework of which other years are known, what
the nearest of them does; else what most software of its year did. Its fitted constants are the generic stack's.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.cost.stack_factors import GENERIC, stacks
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.step.stack import Stack

_SHARDING = {"3": "parameters", "2": "parameters", "hsdp": "parameters", "1": "optimizer", "0": "none"}


def stack_of(row: RunRow, known: dict[str, Stack] | None = None) -> Stack:
    """Return the row's stack: the known one of its name, else what the row suggests.

    Only a known stack has fitted constants; the name says which was taken.
    """
    known = stacks() if known is None else known
    base = known.get(row.stack)
    if base is None:
        base = unknown_stack(row, known)
    return base.replace(**_stated(row, base))


def _stated(row: RunRow, base: Stack) -> dict[str, Any]:
    """Return the fields that the row's own columns state."""
    changes: dict[str, Any] = {}
    stage = row.text("fsdp_zero_stage")
    if stage in _SHARDING:
        changes["sharding"] = _SHARDING[stage]
    flash = row.text("flash_attn")
    if flash:
        changes["attention"] = "unfused" if flash == "no" else "flash"
    if row.text("sp") in ("yes", "no"):
        changes["sequence_parallel"] = row.text("sp") == "yes"
    if base.kernels != "fused" and row.text("compile") in ("yes", "no"):
        changes["kernels"] = "compiled" if row.text("compile") == "yes" else "eager"
    if row.text("async_tp") in ("yes", "no"):
        changes["tp_overlap"] = row.text("async_tp") == "yes"
    if base.is_tuned:
        changes |= recipe_of(row)
        if row.count("moe_experts"):
            changes["tp_overlap"] = False
    if row.text("gradient_dtype"):
        changes["gradient_accumulation_dtype"] = row.format_of("gradient_dtype")
    if row.text("early_stop") in ("yes", "no"):
        changes["recompute_stops_early"] = row.text("early_stop") == "yes"
    if row.precision == "float8-rowwise":
        changes["low_precision_gather"] = False  # A row's scale needs all of its parts.
    return changes


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


_NAME = re.compile(r"(?P<family>.+?)-v?(?P<number>\d+)$")
"""A stack's name: a framework, and the year or the round of its runs."""
_FITTED = ("compute", "communication", "overhead", "num_runs", "relative_error")
_FIRST_FLASH_YEAR = 2022
"""Dao et al. 2022 (arXiv:2205.14135)."""


def unknown_stack(row: RunRow, known: Mapping[str, Stack]) -> Stack:
    """Return what the row's stack probably does; its name says after what."""
    generic = known[GENERIC]
    relative = _relative(row, known)
    if relative is None:
        return generic.replace(**_usual(row))
    fitted = {name: getattr(generic, name) for name in _FITTED}
    is_tuned = relative.is_tuned and row.text("tuned") == "yes"
    return relative.replace(name=f"{GENERIC} (does what {relative.name} does)", is_tuned=is_tuned, **fitted)


def _relative(row: RunRow, known: Mapping[str, Stack]) -> Stack | None:
    """Return the known stack of the framework that the row's columns name, of the nearest year; None without."""
    families: dict[str, dict[int, Stack]] = {}
    for name, stack in known.items():
        if parts := _NAME.match(name):
            families.setdefault(parts["family"], {})[int(parts["number"])] = stack
    for text in (row.stack, row.text("framework")):
        words = f"-{re.sub('[^a-z0-9]+', '-', text.lower())}-"
        named = [family for family in families if f"-{family}-" in words]
        if named:
            members = families[max(named, key=len)]
            number = _number(row.stack) or max(members)
            return members[min(members, key=lambda one: (abs(one - number), -one))]
    return None


def _number(name: str) -> int:
    parts = _NAME.match(name)
    return int(parts["number"]) if parts else 0


def _usual(row: RunRow) -> dict[str, Any]:
    """Return what software of the row's year did where the row is silent."""
    is_split = (row.count("tp") or 1) > 1 or (row.count("pp") or 1) > 1
    is_sharded = row.text("fsdp_zero_stage") in ("2", "3", "hsdp")
    changes: dict[str, Any] = {"kernels": "eager"}
    if is_split and not is_sharded:
        changes = {"sharding": "optimizer", "kernels": "fused", "selective": "core-attention"}
        changes["recompute_stops_early"] = False
    changes |= {name: row.text(name) for name in ("kernels", "dispatcher") if row.text(name)}
    year = _number(row.stack)
    if row.text("flash_attn") == "no" or (not row.text("flash_attn") and 2000 < year < _FIRST_FLASH_YEAR):
        changes["recompute_stops_early"] = False
        changes |= {"attention": "unfused", "sequence_parallel": False, "dp_overlap": False, "p2p_overlap": False}
    return changes
