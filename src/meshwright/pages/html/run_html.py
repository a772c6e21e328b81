"""A training run as one HTML file: its curves, where its steps went, and what was predicted of them."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from meshwright.pages.figures.run_figures import MEDIAN, curve_figure, measured_waterfall_figure, parts_figure
from meshwright.pages.html.html_page import cards, paragraph, plot, section, table, write_page
from meshwright.pages.tables.page_table import percent
from meshwright.pages.tables.run_table import difference_words, untimed_words
from meshwright.pages.tables.waterfall import NO_PEAK, NO_PEAK_OF_EXAMPLE, mfu_words
from meshwright.pages.tables.waterfall_lines import change_words, floor_words, other_words, source_words
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Manifest, how_to_profile
from meshwright.spec.run.run_report import RunReport
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition
from meshwright.spec.step.step_waterfall import MEASURED
from meshwright.units import format_bytes, format_count, format_duration

CURVES = {
    "loss": ("Loss", "Of each step's batch, and of the validation set where it was computed."),
    "grad_norm": ("Gradient norm", "Before clipping."),
    "tokens_per_s": ("Tokens per second", "Of all ranks together."),
    "step_s": ("Step time", "Seconds; the dashed line is the prediction."),
    "memory_bytes": ("Memory", "GiB, the peak of rank 0."),
    "learning_rate": ("Learning rate", "As the schedule set it."),
}
"""By column of RunMetrics: its title and its note."""


def write_run_html(report: RunReport, file: Path) -> None:
    """Write the page of a run to `file`."""
    body = [
        *_head(report),
        _cards(report),
        *_curves(report),
        _waterfall(report),
        *_parts(report),
        _attempts(report.manifest),
    ]
    write_page(f"Run {report.folder}", body, file)


def _head(report: RunReport) -> Iterator[str]:
    job, layout = report.manifest.job, report.layout
    yield f"<h1>{escape(str(report.folder))}</h1>"
    words = layout_text(layout) or "one rank"
    source = f"{job.model.source}, {format_count(report.manifest.num_parameters)} parameters"
    yield f"<p>{escape(source)}; {layout.num_ranks} ranks: {escape(words)}.</p>"
    yield from map(paragraph, untimed_words(report))


def _cards(report: RunReport) -> str:
    metrics = report.metrics
    named = {
        "steps": f"{len(metrics):,}",
        "last loss": f"{metrics.loss[-1]:.4f}",
        "step, median": format_duration(report.measured_s),
        **_predicted(report),
        "memory, peak of rank 0": format_bytes(float(metrics.memory_bytes.max())),
    }
    return cards(named)


def _predicted(report: RunReport) -> dict[str, str]:
    if report.predicted is None:
        return {}
    off = report.predicted.step_s / report.measured_s
    title = "predicted step of an example machine: this one is not calibrated"
    if report.example is None:
        title = f"predicted step, {100 * (off - 1):+.1f} %"
    mfu = report.predicted.estimate.mfu
    return {title: format_duration(report.predicted.step_s)} | ({} if mfu is None else {"MFU": percent(mfu * off)})


def _curves(report: RunReport) -> Iterator[str]:
    for column, (title, note) in CURVES.items():
        figure = curve_figure(report.metrics, column, report.predicted_s if column == "step_s" else None)
        if figure is not None:
            yield section(title, note, plot(figure))


def _waterfall(report: RunReport) -> str:
    found = report.waterfall
    source = source_words(found, how_to_profile(report.manifest.job))
    words = [source, *floor_words(found), *other_words(found), *change_words(found)]
    if report.predicted is None and found.source == "timers":
        return "".join(map(paragraph, words))
    note = ""
    if report.predicted is not None:
        words += [difference_words(report)] if report.example is None else []
        no_peak = NO_PEAK if report.example is None else NO_PEAK_OF_EXAMPLE
        note = (
            f"{no_peak if report.predicted.estimate.mfu is None else mfu_words(report.manifest.job.precision.matmuls)}."
        )
    drawn = plot(measured_waterfall_figure(found)) + "".join(map(paragraph, words))
    whose = f" of rank {found.rank}" if found.source == "profile" and found.num_ranks > 1 else ""
    return section(f"Step{whose} by cause, from the model FLOPs at the peak up", note, drawn)


def _parts(report: RunReport) -> Iterator[str]:
    parts = report.parts
    if not parts:
        return
    ranks = report.layout.num_ranks
    of_ranks = "" if ranks == 1 else f", the mean of the {ranks} ranks"
    if ranks > 1 and report.waterfall.source == "profile":
        of_ranks += f"; the causes above are of rank {report.waterfall.rank} alone"
    note = f"By component{of_ranks}. The measured step is the median, {format_duration(report.measured_s)}."
    if MEASURED not in parts:
        advice = how_to_profile(report.manifest.job)
        note += f" No step of this run was profiled, so only its total is measured: {advice}."
    shown = shown_parts(parts)
    rows = [(COMPONENT_NAMES[name], *(format_duration(getattr(one, name)) for one in parts.values())) for name in shown]
    rows = [(*row, "") for row in rows]
    rows.append(("step", *(format_duration(one.total_s) for one in parts.values()), format_duration(report.measured_s)))
    headers = ("component", *(f"{name}#" for name in parts), f"{MEDIAN}#")
    drawn = plot(parts_figure(parts, shown, report.measured_s))
    yield section("Where the step goes", note, drawn + table(headers, rows))


def shown_parts(parts: Mapping[str, StepDecomposition]) -> list[str]:
    """Return the parts of a step that take at least a thousandth of one of `parts`."""
    return [name for name in COMPONENTS if any(getattr(one, name) >= 0.001 * one.total_s for one in parts.values())]


def _attempts(manifest: Manifest) -> str:
    rows = [
        (
            one.started_at,
            f"{one.start_step:,}",
            f"{one.layout.num_ranks:,}",
            layout_text(one.layout) or "one rank",
            "running, or killed" if one.exit is None else f"{one.exit}",
            one.git_commit or "-",
        )
        for one in manifest.attempts
    ]
    headers = ("started (UTC)", "after step#", "ranks#", "layout", "exit code", "commit")
    return section("Starts", "A run that was resumed has several.", table(headers, rows))
