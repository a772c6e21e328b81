"""stack_of: the software of a measured run: the stack that its row names, corrected by what its columns say."""

from __future__ import annotations

import re
from typing import Any

from meshwright.cost.stacks import GENERIC, stacks
from meshwright.planner.measured.recipe import recipe_of
from meshwright.planner.measured.row import RunRow
from meshwright.spec.stack import Stack

_SHARDING = {"3": "parameters", "2": "parameters", "hsdp": "parameters", "1": "optimizer", "0": "none"}
_YEAR = re.compile(r"-v?\d+$")


def stack_of(row: RunRow, known: dict[str, Stack] | None = None) -> Stack:
    """Return the row's stack: the known one of its name, else one that does what its relatives do, else a generic one.

    Only a known stack has fitted constants; the name says which was taken.
    """
    known = stacks() if known is None else known
    base = known.get(row.stack)
    if base is None:
        base = _relative(row.stack, known) or _plain(row, known[GENERIC])
    return base.replace(**_stated(row, base))


def _relative(name: str, known: dict[str, Stack]) -> Stack | None:
    """Return what is known of the newest stack that differs from `name` in its year only, its constants left out."""
    family = _YEAR.sub("", name)
    relatives = [stack for other, stack in known.items() if family and _YEAR.sub("", other) == family]
    if not relatives:
        return None
    generic = known[GENERIC]
    fitted = {field: getattr(generic, field) for field in ("compute", "communication", "overhead", "relative_error")}
    return relatives[-1].replace(name=f"{GENERIC} (does what {relatives[-1].name} does)", num_runs=0, **fitted)


def _plain(row: RunRow, generic: Stack) -> Stack:
    """Return the generic stack as the row's columns suggest it."""
    is_split = (row.count("tp") or 1) > 1 or (row.count("pp") or 1) > 1
    is_sharded = row.text("fsdp_zero_stage") in ("2", "3", "hsdp")
    changes: dict[str, Any] = {}
    if is_split and not is_sharded:
        changes = {"sharding": "optimizer", "kernels": "fused", "selective": "core-attention"}
    if row.text("flash_attn") == "no":
        changes |= {"attention": "unfused", "sequence_parallel": False, "dp_overlap": False, "p2p_overlap": False}
    return generic.replace(**changes)


def _stated(row: RunRow, base: Stack) -> dict[str, Any]:
    """Return the fields that the row's own columns tell."""
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
    if "mp_mode=PURE" in row.notes:
        changes["gradient_accumulation_dtype"] = "bfloat16"
    if row.precision == "float8-rowwise":
        changes["low_precision_gather"] = False  # A row's scale is not known before its parts meet.
    return changes
