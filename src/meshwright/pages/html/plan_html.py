"""A plan as one HTML file that needs no network: the pick, its time and memory as plots, and every table."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from meshwright.pages.figures.plan_figures import memory_ranks_figure, pareto_figure, step_figure
from meshwright.pages.html.html_page import cards, paragraph, plot, rich_table, section, write_page
from meshwright.pages.tables.page_table import percent
from meshwright.pages.tables.plan_speedup import largest_speedup
from meshwright.pages.tables.plan_table import (
    given_words,
    memory_table,
    pick_notes,
    pick_table,
    plan_tables,
    request_words,
)
from meshwright.pages.tables.simulated_table import simulated_page
from meshwright.pages.tables.waterfall import HFU_MEANS, NO_PEAK, mfu_words
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Plan
from meshwright.units import format_bytes, format_count, format_interval

_FRONTIER = (
    "Each point is a layout: lower is faster, further right leaves more memory free. The line is the Pareto front: "
    "each layout on it leaves more memory free than every faster one. The pick is the simplest layout within the "
    "ranking error of the fastest, or one as simple that leaves more memory, so it can be off the line: slower and "
    "larger than a more complex layout. Numbers are the rows of the table of runners-up. Grey: kept free by "
    "planner.memory_margin. Red: does not fit."
)


def write_plan_html(plan: Plan, file: Path, budget: Iterable[RenderableType] = ()) -> None:
    """Write the page of a plan; `budget` are the parts of the terminal's page on days and cost."""
    parts = [*_head(plan), _cards(plan), *_given(plan), *_step(plan), *_layouts(plan)]
    write_page(f"Plan of {plan.model}", [*parts, *_rendered("Time and cost of the run", budget)], file)


def _head(plan: Plan) -> Iterator[str]:
    yield f"<h1>{escape(plan.model)} on {plan.num_devices:,} x {escape(plan.device)}</h1>"
    count = format_count(plan.num_parameters)
    yield paragraph(f"{count} parameters; {plan.cluster}. {'; '.join(request_words(plan))}.")
    yield f"<p><code>{escape(layout_text(plan.pick.layout.effective).replace(',', ', '))}</code></p>"
    yield from map(paragraph, pick_notes(plan))


def _cards(plan: Plan) -> str:
    estimate = plan.pick.estimate
    shares = {"MFU": estimate.mfu, "HFU": estimate.hfu}
    step, interval = format_interval(estimate.step.total_s, estimate.relative_error)
    return cards(
        {f"step, 80 %: {interval}": step}
        | {"tokens/s a device": f"{plan.tokens_per_s_per_device:,.0f}"}
        | {name: percent(share) for name, share in shares.items() if share is not None}
        | {f"memory of {format_bytes(plan.usable_memory_bytes)}": format_bytes(estimate.memory.reserved_bytes)}
    )


def _given(plan: Plan) -> Iterator[str]:
    """Yield the layout that the job sets next to the pick, if it sets one."""
    words = "".join(map(paragraph, given_words(plan)))
    if words:
        table = "" if plan.given is None else rich_table(pick_table(plan))
        yield section("The layout that the job sets", "", table + words)


def _step(plan: Plan) -> Iterator[str]:
    means = NO_PEAK if plan.pick.estimate.mfu is None else f"{mfu_words(plan.workload.precision)}. {HFU_MEANS}"
    yield section("Where the step goes", f"{means}.", plot(step_figure(plan)))
    yield from _rendered("Simulated steps", simulated_page(plan))


def _memory(plan: Plan) -> str:
    note = "Of the fullest device of each pipeline rank, by tensor class."
    table = rich_table(memory_table(plan.memory_by_pipeline_rank, plan.usable_memory_bytes))
    return section("Memory", note, plot(memory_ranks_figure(plan)) + table)


def _layouts(plan: Plan) -> Iterator[str]:
    pareto, *others = plan_tables(plan)
    yield section("Step time against memory", _FRONTIER, plot(pareto_figure(plan)) + rich_table(pareto))
    yield _memory(plan)
    inner = "".join(rich_table(table) for table in others)
    yield section("Other layouts, and other hardware", "", inner + paragraph(largest_speedup(plan)))


def _rendered(title: str, parts: Iterable[RenderableType]) -> Iterator[str]:
    """Yield a section with parts of a terminal's page, if there are any."""
    drawn = [rich_table(part) if isinstance(part, Table) else paragraph(f"{part}") for part in parts if part]
    if drawn:
        yield section(title, "", "".join(drawn))
