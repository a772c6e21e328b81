"""A dry run's memory as tables: each rank's fullest moment, what the fullest holds then, and could do without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.markup import escape
from rich.table import Table

from meshwright.report.waterfall import plain_table
from meshwright.spec.dry_run import DryRun, Outcome
from meshwright.spec.liveness import SavedTensors
from meshwright.units import format_bytes, format_duration

Row = TypeVar("Row")

_MOST_RANKS = 16


def rank_memory_table(run: DryRun, outcome: Outcome) -> Table:
    """Return the fullest moment of each rank."""
    table = plain_table()
    for header in ("memory", "ranks", "allocated", "reserved", "free", "peak in", "module", "mostly"):
        is_number = header in ("ranks", "allocated", "reserved", "free")
        table.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for rank in shown_ranks(outcome.memory):
        left = run.usable_memory_bytes - rank.reserved_bytes
        free = format_bytes(left) if left >= 0 else f"[red]-{format_bytes(-left)}"
        most = sorted(rank.by_role, key=lambda role: -rank.by_role[role])[:2]
        table.add_row(
            f"rank {rank.rank}, pp {rank.pipeline_rank}"
            if run.layout is not None and run.layout.pp > 1
            else f"rank {rank.rank}",
            f"{rank.num_ranks:,}",
            format_bytes(rank.allocated_bytes),
            format_bytes(rank.reserved_bytes),
            free,
            rank.phase,
            escape(rank.scope) or "-",
            ", ".join(f"{role.replace('_', ' ')} {format_bytes(rank.by_role[role])}" for role in most),
        )
    return table


def largest_table(outcome: Outcome) -> Table:
    """Return what the fullest rank holds at its peak."""
    table, fullest = plain_table(), outcome.fullest
    for header in (f"rank {fullest.rank} at its peak", "bytes", "tensors", "made by", "in"):
        table.add_column(header, justify="right" if header in ("bytes", "tensors") else "left", overflow="fold")
    for live in fullest.largest:
        cells = (format_bytes(live.num_bytes), f"{live.count:,}", live.op, escape(live.scope))
        table.add_row(live.role.replace("_", " "), *cells)
    return table


def savings_table(outcome: Outcome) -> Table:
    """Return what of it is cheapest to do without."""
    table = plain_table()
    first = f"rank {outcome.fullest.rank} could do without"
    for header in (first, "tensors", "computed again in", "or moved in", "made by", "in"):
        table.add_column(header, justify="left" if header in ("made by", "in") else "right", overflow="fold")
    for saved in outcome.savings:
        table.add_row(*map(escape, saving_cells(saved)))
    return table


def saving_cells(saved: SavedTensors) -> tuple[str, ...]:
    """Return bytes, number, seconds of computing again and of moving, and what made them where."""
    again, moved = ("-" if seconds is None else format_duration(seconds) for seconds in (saved.again_s, saved.moved_s))
    return format_bytes(saved.num_bytes), f"{saved.count:,}", again, moved, saved.op, saved.scope


def shown_ranks(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; of many the first and the last."""
    if len(rows) <= _MOST_RANKS:
        return list(rows)
    return [*rows[: _MOST_RANKS // 2], *rows[-_MOST_RANKS // 2 :]]
