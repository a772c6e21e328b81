"""A dry run's memory as tables: each rank's peak, what the fullest holds then, recompute and offload candidates.

Each table has one column of words, the last: next to the figures 80 columns leave too little for the names of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, labels_of
from meshwright.spec.step.dry_run_report import DryRun, Outcome, RankMemory
from meshwright.spec.step.liveness import SavedTensors
from meshwright.units import format_bytes, format_duration

Row = TypeVar("Row")
AlikeRow = tuple[int, int, tuple[str, ...]]
"""A rank, how many do the same, and what a table says of it."""

_MOST_RANKS = 16
_CANDIDATES = "recompute and offload candidates at the peak"


def rank_memory_table(run: DryRun, outcome: Outcome) -> Table:
    """Return the fullest moment of each rank."""
    table = PageTable("memory", "ranks#", "allocated#", "reserved#", "free#", "peak in")
    rows = []
    for rank in outcome.memory:
        left = run.usable_memory_bytes - rank.reserved_bytes
        free = format_bytes(left) if left >= 0 else f"[red]-{format_bytes(-left)}"
        most = sorted(rank.by_role, key=lambda role: -rank.by_role[role])[:2]
        held = ", ".join(f"{role.replace('_', ' ')} {format_bytes(rank.by_role[role])}" for role in most)
        where = f"{rank.phase} {escape(rank.scope)}".strip()
        stage = f", pp {rank.pipeline_rank}" if run.layout is not None and run.layout.pp > 1 else ""
        sizes = (format_bytes(rank.allocated_bytes), format_bytes(rank.reserved_bytes), free)
        rows.append((rank.rank, rank.num_ranks, (stage, *sizes, f"{where}: {held}" if where else held)))
    for first, num_ranks, (stage, *cells) in shown_ranks(alike_once(rows)):
        table.add_row(f"rank {first}{stage}", f"{num_ranks:,}", *cells)
    return table


def alike_once(rows: Sequence[AlikeRow]) -> list[AlikeRow]:
    """Return the rows, of those with the same cells the first with the number of ranks of all."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for rank, num_ranks, cells in rows:
        first, others = found.get(cells, (rank, 0))
        found[cells] = (first, others + num_ranks)
    return [(first, num_ranks, cells) for cells, (first, num_ranks) in found.items()]


def largest_table(outcome: Outcome) -> Table:
    """Return what the fullest rank holds at its peak."""
    fullest = outcome.fullest
    table = PageTable("" if fullest is None else f"rank {fullest.rank} at its peak", "bytes#", "tensors#", "made by")
    for live in () if fullest is None else fullest.largest:
        cells = (format_bytes(live.num_bytes), f"{live.num_tensors:,}", _maker(live.op, live.scope, live.line))
        table.add_row(live.role.replace("_", " "), *cells)
    return table


def most_held(rank: RankMemory) -> str:
    """Return what takes most of a rank's memory: bytes, what for, and what made it where."""
    if not rank.largest:
        return ""
    most = rank.largest[0]
    number = f"{most.num_tensors:,} tensors" if most.num_tensors > 1 else "one tensor"
    made = _maker(most.op, most.scope, most.line)
    return f"most is {most.role.replace('_', ' ')}, {format_bytes(most.num_bytes)} in {number} ({made})"


def savings_table(outcome: Outcome) -> Table:
    """Return the tensors of the fullest rank that cost least to recompute or offload."""
    table = PageTable(*labels_of("num_bytes", "num_tensors", "recompute_s", "offload_s"), "made by")
    table.title = _CANDIDATES
    for saved in outcome.savings:
        *figures, op, scope = saving_cells(saved)
        table.add_row(*figures, _maker(op, scope))
    return table


def saving_cells(saved: SavedTensors) -> tuple[str, ...]:
    """Return bytes, number, seconds of recomputation and of offloading, the operator and its place."""
    costs = ("-" if seconds is None else format_duration(seconds) for seconds in (saved.recompute_s, saved.offload_s))
    return format_bytes(saved.num_bytes), f"{saved.num_tensors:,}", *costs, saved.op, saved.scope


def _maker(op: str, scope: str, line: str = "") -> str:
    """Return an operation, in whose code it is, and the line of the program."""
    where = f"{short_op(op)} in {escape(scope)}" if scope else short_op(op)
    return f"{where}, {escape(line)}" if line else where


def short_op(op: str) -> str:
    """Return an operator's name without the library and the overload: c10d._allgather_base_.default is long."""
    name = op.split(".")[1] if op.count(".") > 1 else op.rpartition(".")[2]
    return name.strip("_")


def shown_ranks(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; of many the first and the last."""
    if len(rows) <= _MOST_RANKS:
        return list(rows)
    return [*rows[: _MOST_RANKS // 2], *rows[-_MOST_RANKS // 2 :]]
