"""A run's page, predicted next to measured cause by cause, and two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table

from meshwright.pages.tables.compare_table import parts_table
from meshwright.pages.tables.page_table import PageTable, percent, signed_percent
from meshwright.pages.tables.waterfall import HFU_MEANS, MFU_MEANS, NO_PEAK, waterfall
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run_report import RunComparison, RunReport, RunSummary
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.units import format_bytes, format_count, format_duration, label_of


def run_page(report: RunReport) -> Iterator[RenderableType]:
    """Yield the parts of the page: the layout, the waterfall up to the measured step, what is left unexplained."""
    measured_s = report.measured_s
    yield f"[bold]{report.folder}[/], {layout_text(report.layout) or 'one rank'}"
    yield ""
    if report.predicted is None:
        yield f"measured, the median     {format_duration(measured_s)} ({report.metrics.timed_words})"
        yield not_predicted_words(report)
        return
    estimate = report.predicted.estimate
    total_s = estimate.step.total_s
    yield waterfall(estimate)
    yield f"measured, the median     {format_duration(measured_s)} ({report.metrics.timed_words})"
    yield difference_words(report)
    yield ""
    if estimate.mfu is None:
        yield NO_PEAK
        return
    # The floor is the same work at the peak, so that a measured MFU is the predicted one on another step.
    measured = f"{percent(estimate.mfu * total_s / measured_s)} measured"
    yield f"MFU {measured}, {percent(estimate.mfu)} predicted. {MFU_MEANS}."
    if estimate.hfu is not None:
        yield f"HFU {percent(estimate.hfu * total_s / measured_s)} measured. {HFU_MEANS}."


def not_predicted_words(report: RunReport) -> str:
    """Return why nothing is predicted of the run's model."""
    source = report.manifest.job.model.source
    return (
        f"no prediction: the formulas do not know the operations of {source}, a class of your own; `meshwright report "
        "--simulate` traces its step"
    )


def difference_words(report: RunReport) -> str:
    """Return how far the predicted step is from the measured one, or that it is of another machine."""
    if report.example is not None:
        return (
            f"This machine is not calibrated: the step above is predicted for an example, {report.example}, and says "
            "little about this machine. `meshwright calibrate` measures it."
        )
    assert report.predicted is not None
    assert report.predicted_s is not None
    return (
        f"predicted and measured differ by {percent(report.predicted_s / report.measured_s - 1)} of the measured step "
        f"(the interval is ±{percent(report.predicted.estimate.relative_error, 0)})"
    )


def parts_section(
    parts: dict[str, StepDecomposition], measured_s: float, how_to_profile: str
) -> Iterator[RenderableType]:
    """Yield the step by component: what each prediction in `parts` says, and last, where it is there, the profile."""
    yield ""
    if parts:
        yield parts_table(parts)
    if MEASURED not in parts:
        yield f"measured by component: no step of this run was profiled; {how_to_profile}"
        return
    profiled_s = parts[MEASURED].total_s
    yield (
        f"The profiled step took {format_duration(profiled_s)}, {percent(profiled_s / measured_s - 1)} more than the "
        "median: profiling costs time itself, most of it the host's."
    )


MEASURED = "measured"
"""The column of what was measured."""


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
    yield f"medians: A {found.a.timed_steps}, B {found.b.timed_steps}, without the first of an attempt, which warm up"


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
