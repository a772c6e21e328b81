"""Stragglers as a table: which rank is slow, which ranks wait for it, and in which communication."""

from collections.abc import Iterator

from rich.console import RenderableType

from meshwright.pages.tables.page_table import PageTable, labels_of, signed
from meshwright.spec.step.simulation_report import Outcome, Stragglers, Straggling
from meshwright.spec.trace.timeline import NO_AXIS
from meshwright.units import format_duration

HEADERS = (
    *labels_of("rank", "num_ranks", "compute_s", "added_compute_s", "added_wait_s"),
    "op, axis",
    *labels_of("op_wait_s", "count"),
)
_MOST_ROWS = 12
_SLOW = 0.05
"""Part of a rank's computing that is added from which on it is slow itself."""


def stragglers_parts(outcome: Outcome) -> Iterator[RenderableType]:
    """Yield a line with what stragglers cost the step, and the table; nothing where none are simulated."""
    if outcome.stragglers is None:
        return
    yield ""
    yield stragglers_words(outcome, outcome.stragglers)
    table = PageTable(*HEADERS)
    for one in shown_stragglers(outcome.stragglers):
        table.add_row(*straggling_cells(one))
    left = len(outcome.stragglers.ranks) - _MOST_ROWS
    table.caption = f"and {left} more classes of ranks" if left > 0 else None
    yield table


def stragglers_words(outcome: Outcome, stragglers: Stragglers) -> str:
    """Return by how much the step is longer than without stragglers."""
    added_s = outcome.step_s - stragglers.usual_step_s
    share = 100 * added_s / stragglers.usual_step_s
    words = f"stragglers add {format_duration(added_s)} ({share:+.1f} %) to a step of "
    words += format_duration(stragglers.usual_step_s)
    if outcome.predicted is not None:
        words += f"; predicted for usual stragglers: {format_duration(outcome.predicted.step.stragglers_s)}"
    return words


def shown_stragglers(stragglers: Stragglers) -> list[Straggling]:
    """Return the ranks that are slowed down most, then those that wait most."""
    is_slow = {one.rank: one.added_compute_s > _SLOW * one.compute_s for one in stragglers.ranks}
    by_change = sorted(stragglers.ranks, key=lambda one: (not is_slow[one.rank], -one.added_wait_s))
    return by_change[:_MOST_ROWS]


def straggling_cells(one: Straggling) -> tuple[str, ...]:
    """Return the cells of a rank, in the order of HEADERS."""
    where = ("-", "-", "-")
    if one.op:
        where = (f"{one.op.split('.')[1].strip('_')}, {one.axis or NO_AXIS}", signed(one.op_wait_s), f"{one.count:,}")
    seconds = (format_duration(one.compute_s), signed(one.added_compute_s), signed(one.added_wait_s))
    return f"{one.rank}", f"{one.num_ranks:,}", *seconds, *where


def predicted_words(outcome: Outcome) -> str:
    """Return what heads the formulas' figures: they know what stragglers usually add, not those that are simulated."""
    return "predicted" if outcome.stragglers is None else "predicted (no slow rank)"
