"""stack_of: the software of a measured run: the stack that its row names, corrected by what its columns say."""

from __future__ import annotations

from typing import Any

from meshwright.cost.stacks import stacks
from meshwright.evaluation.dataset.recipe import recipe_of
from meshwright.evaluation.dataset.row import RunRow
from meshwright.evaluation.dataset.unknown_stack import unknown_stack
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
