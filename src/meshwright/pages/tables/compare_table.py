"""Two steps side by side as a page: by component, by operation, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, percent
from meshwright.spec.step.comparison import Comparison, Operation, RankComparison, Side
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition
from meshwright.units import format_duration, label_of

_MOST_ROWS = 12
_LEAST_SHARE = 0.001
"""Of a step: what differs by less is noise, and not worth a line."""
_UNEQUAL_SHARE = 0.02
"""Share of the step below which ranks' differences are not listed."""


def compare_page(found: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield f"[bold]A[/] {_side(found.a)}"
    yield f"[bold]B[/] {_side(found.b)}"
    yield ""
    yield parts_table({"A": found.a.parts, "B": found.b.parts})
    if rows := _noticeable(found.operations, found):
        yield ""
        yield _operations_table("what differs most, per rank", rows)
    if rows := _noticeable(found.miscounted, found):
        yield ""
        yield _operations_table("what runs more often in one of them, per rank", rows)
    if _are_unequal(found.ranks):
        yield ""
        yield _ranks_table(found.ranks[:_MOST_ROWS])


def _side(side: Side) -> str:
    source = side.source
    ranks = "1 rank" if side.num_ranks == 1 else f"{side.num_ranks:,} ranks"
    return f"{escape(source.place)}, {source.kind}: {ranks}, a step of {format_duration(side.step_s)}"


def parts_table(columns: dict[str, StepDecomposition]) -> Table:
    """Return a row for each component with its seconds in every column, and how the last of several differs from the
    first.
    """
    parts = list(columns.values())
    compares = len(parts) > 1
    difference_s = parts[-1].total_s - parts[0].total_s
    least_s = _LEAST_SHARE * max(one.total_s for one in parts)
    differences = ("difference#", "of all difference#") if compares else ()
    table = PageTable("where the step goes", *(f"{name}#" for name in columns), *differences)
    for name in COMPONENTS:
        seconds = [getattr(one, name) for one in parts]
        if max(seconds) >= least_s:
            more_s = seconds[-1] - seconds[0]
            share = percent(more_s / difference_s, 0) if abs(difference_s) > least_s else ""
            table.add_row(
                COMPONENT_NAMES[name], *map(format_duration, seconds), *((signed(more_s), share) if compares else ())
            )
    totals = [format_duration(one.total_s) for one in parts] + [signed(difference_s)] * compares
    table.add_row(*(f"[bold]{cell}" for cell in ("step", *totals)))
    return table


def signed(difference_s: float) -> str:
    """Return a difference with its sign; below a nanosecond are the ends of sums that differ in their order."""
    return (
        "0 s" if abs(difference_s) < 1e-9 else f"{'+' if difference_s > 0 else '-'}{format_duration(abs(difference_s))}"
    )


def _noticeable(operations: Sequence[Operation], found: Comparison) -> list[Operation]:
    least_s = _LEAST_SHARE * max(found.a.step_s, found.b.step_s)
    return [one for one in operations if max(one.a.total_s, one.b.total_s) >= least_s][:_MOST_ROWS]


def _operations_table(title: str, operations: Sequence[Operation]) -> Table:
    table = PageTable(title, "scope", "axis", "count A#", "count B#", "A#", "B#", "difference#")
    for one in operations:
        name = f"waiting for {one.name}" if one.kind == "waiting" else one.name
        counts = ("", "") if one.kind == "waiting" else (f"{one.a.count:g}", f"{one.b.count:g}")
        seconds = (format_duration(one.a.total_s), format_duration(one.b.total_s), signed(one.difference_s))
        table.add_row(escape(name), escape(one.scope), one.axis, *counts, *seconds)
    return table


def _are_unequal(ranks: Sequence[RankComparison]) -> bool:
    """Return whether a component of one rank is noticeably another's, in either step."""
    sides = ([one.a for one in ranks], [one.b for one in ranks])
    return any(
        max(values) - min(values) > _UNEQUAL_SHARE * max(part.total_s for part in side)
        for side in sides
        if side
        for values in ([getattr(part, name) for part in side] for name in COMPONENTS)
    )


def _ranks_table(ranks: Sequence[RankComparison]) -> Table:
    names = ("compute_s", "exposed_s", "pipeline_bubble_s", "cpu_bound_s")
    table = PageTable("rank#", *(f"{label_of(name)} {side}#" for name in names for side in "AB"))
    for one in ranks:
        cells = (format_duration(getattr(side, name)) for name in names for side in (one.a, one.b))
        table.add_row(str(one.rank), *cells)
    return table
