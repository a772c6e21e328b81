"""Two training runs side by side as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, signed_percent
from meshwright.spec.label import label_of
from meshwright.spec.run.run_comparison import RunComparison, RunSummary
from meshwright.units import format_bytes, format_count, format_duration

_FIGURES: dict[str, Callable[[float], str]] = {
    "num_steps": "{:.0f}".format,
    "num_ranks": "{:.0f}".format,
    "last_loss": "{:.4f}".format,
    "validation_loss": "{:.4f}".format,
    "median_step_s": format_duration,
    "median_tokens_per_s": format_count,
    "peak_memory_bytes": format_bytes,
}
"""By field of RunSummary what formats it."""


def run_summary_table(summary: RunSummary) -> Table:
    """Return the figures of one run."""
    table = PageTable("", "#")
    for name, form in _FIGURES.items():
        if (value := getattr(summary, name)) is not None:
            table.add_row(label_of(name), form(value))
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
    table = PageTable("", "A#", "B#", "B vs A#")
    for name, form in _FIGURES.items():
        of_a, of_b = getattr(found.a, name), getattr(found.b, name)
        if of_a is None and of_b is None:
            continue
        cells = ("-" if value is None else form(value) for value in (of_a, of_b))
        change = "" if of_a is None or of_b is None or not of_a else signed_percent(of_b / of_a - 1)
        table.add_row(label_of(name), *cells, change)
    yield table


def _settings(found: RunComparison) -> Iterator[RenderableType]:
    if not found.changed_settings:
        yield "same job, layout and versions"
        return
    table = PageTable("changed settings", "A", "B")
    for one in found.changed_settings:
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
    table = PageTable("step", "A#", "B#", "B - A#")
    for one in found.losses:
        table.add_row(f"{one.step}", f"{one.a:.5f}", f"{one.b:.5f}", f"{one.b - one.a:+.2e}")
    yield table
