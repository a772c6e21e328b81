"""Two training runs side by side as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table

from meshwright.pages.tables.waterfall import table_of
from meshwright.spec.run.run_comparison import RunComparison, RunSummary
from meshwright.units import format_bytes, format_count, format_duration

_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "num_steps": ("steps", "{:.0f}".format),
    "num_ranks": ("ranks", "{:.0f}".format),
    "last_loss": ("last loss", "{:.4f}".format),
    "validation_loss": ("validation loss", "{:.4f}".format),
    "step_s": ("step, median", format_duration),
    "tokens_per_s": ("tokens/s, median", format_count),
    "memory_bytes": ("memory, peak of rank 0", format_bytes),
}
"""By field of RunSummary: what it is called, and what formats it."""


def run_summary_table(summary: RunSummary) -> Table:
    """Return the figures of one run."""
    table = table_of("", "#")
    for name, (words, form) in _FIGURES.items():
        if (value := getattr(summary, name)) is not None:
            table.add_row(words, form(value))
    return table


def run_comparison_page(found: RunComparison) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield f"[bold]A[/] {found.a.name}"
    yield f"[bold]B[/] {found.b.name}"
    yield ""
    yield from _figures(found)
    yield ""
    yield from _settings(found)
    yield ""
    yield from _losses(found)


def _figures(found: RunComparison) -> Iterator[RenderableType]:
    table = table_of("", "A#", "B#", "B vs A#")
    for name, (words, form) in _FIGURES.items():
        of_a, of_b = getattr(found.a, name), getattr(found.b, name)
        if of_a is None and of_b is None:
            continue
        cells = ("-" if value is None else form(value) for value in (of_a, of_b))
        change = "" if of_a is None or of_b is None or not of_a else f"{100 * (of_b / of_a - 1):+.1f} %"
        table.add_row(words, *cells, change)
    yield table


def _settings(found: RunComparison) -> Iterator[RenderableType]:
    if not found.changed:
        yield "same job, layout and versions"
        return
    table = table_of("settings that differ", "A", "B")
    for one in found.changed:
        table.add_row(one.key, *("not set" if value is None else str(value) for value in (one.a, one.b)))
    yield table


def _losses(found: RunComparison) -> Iterator[RenderableType]:
    if not found.num_common_steps:
        yield "no step in common, so that no losses are compared"
        return
    if found.first_difference is None:
        yield f"losses: bitwise equal in all {found.num_common_steps} common steps"
        return
    yield f"losses: first differ at step {found.first_difference} of {found.num_common_steps} in common"
    table = table_of("step", "A#", "B#", "B - A#")
    for one in found.losses:
        table.add_row(f"{one.step}", f"{one.a:.5f}", f"{one.b:.5f}", f"{one.b - one.a:+.2e}")
    yield table
