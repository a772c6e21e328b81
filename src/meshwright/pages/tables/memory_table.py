"""Tables of a plan's memory: the fullest rank by tensor class, and every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, percent
from meshwright.spec.step.estimate import MEMORY_CLASSES, MemoryUse
from meshwright.units import GiB

_MAX_RANKS = 4


def memory_table(ranks: Sequence[MemoryUse], usable_bytes: int) -> Table:
    """Return the classes of memory by pipeline rank, in GiB; of many ranks the first, the fullest and the last.

    Their sum is what the allocator reserves, of `usable_bytes`: what context and communicators leave of the device.
    """
    shown = _shown(ranks)
    names = ("every rank" if len(ranks) == 1 else f"pp rank {rank}" for rank in shown)
    table = PageTable("memory by class, GiB", *(f"{name}#" for name in names))
    for name, label in MEMORY_CLASSES.items():
        values = [getattr(ranks[rank], name) for rank in shown]
        if any(values) and name != "context_bytes":
            table.add_row(label, *(_gib(value) for value in values))
    table.add_row("[bold]reserved", *(f"[bold]{_gib(ranks[rank].reserved_bytes)}" for rank in shown))
    left = [usable_bytes - ranks[rank].reserved_bytes for rank in shown]
    table.add_row(
        f"free of {_gib(usable_bytes)}", *(f"{_gib(value)} ({percent(value / usable_bytes, 0)})" for value in left)
    )
    return table


def _shown(ranks: Sequence[MemoryUse]) -> list[int]:
    if len(ranks) <= _MAX_RANKS:
        return list(range(len(ranks)))
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].reserved_bytes)
    return sorted({0, fullest, len(ranks) // 2, len(ranks) - 1})


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GiB:.2f}"
