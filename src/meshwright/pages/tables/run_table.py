"""A run's page: what its step was expected to take, cause by cause, next to what it took."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from meshwright.pages.tables.compare_table import parts_table
from meshwright.pages.tables.page_table import percent
from meshwright.pages.tables.waterfall import HFU_MEANS, MFU_MEANS, NO_PEAK, waterfall
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run_report import RunReport
from meshwright.spec.step.step_decomposition import StepDecomposition
from meshwright.units import format_duration


def run_page(report: RunReport) -> Iterator[RenderableType]:
    """Yield the parts of the page: the layout, the waterfall up to the measured step, what is left unexplained."""
    estimate, measured_s = report.expected.estimate, report.measured_s
    total_s = estimate.step.total_s
    yield f"[bold]{report.folder}[/], {layout_text(report.expected.layout) or 'one rank'}"
    yield ""
    yield waterfall(estimate)
    yield f"measured, the median     {format_duration(measured_s)}"
    yield _difference(report)
    yield ""
    if estimate.mfu is None:
        yield NO_PEAK
        return
    # The floor is the same work at the peak, so that a measured MFU is the expected one on another step.
    yield f"MFU {percent(estimate.mfu * total_s / measured_s)} measured, {percent(estimate.mfu)} expected. {MFU_MEANS}."
    if estimate.hfu is not None:
        yield f"HFU {percent(estimate.hfu * total_s / measured_s)} measured. {HFU_MEANS}."


def _difference(report: RunReport) -> str:
    """Return how far the expected step is from the measured one, or that it is of another machine."""
    if report.example is not None:
        return (
            f"This machine is not calibrated: the step above is expected of an example, {report.example}, and says "
            "little about this machine. `meshwright calibrate` measures it."
        )
    return (
        f"expected and measured differ by {percent(report.predicted_s / report.measured_s - 1)} of the measured step "
        f"(the interval is ±{percent(report.expected.estimate.relative_error, 0)})"
    )


def parts_section(
    parts: dict[str, StepDecomposition], measured_s: float, how_to_profile: str
) -> Iterator[RenderableType]:
    """Yield the step by component: what each prediction in `parts` says, and last, where it is there, the profile."""
    yield ""
    yield parts_table(parts)
    if MEASURED not in parts:
        yield f"measured by component: no step of this run was profiled; {how_to_profile}"
        return
    profiled_s = parts[MEASURED].total_s
    yield (
        f"The profiled step took {format_duration(profiled_s)}, {percent(profiled_s / measured_s - 1)} more than the "
        "median: profiling costs time itself, most of it the host's."
    )


MEASURED = "profiled"
"""The column of what was measured."""
