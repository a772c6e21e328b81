"""unknown_stack: what software without measured runs probably does, inferred from a run's row.

Where the row names a framework of which other years are known, what the nearest of them does; else what most software
of its year did. Its fitted constants are the generic stack's either way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.cost.stacks import GENERIC
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.step.stack import Stack

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
