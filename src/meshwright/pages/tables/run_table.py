"""A run's page, predicted next to measured cause by cause, and two runs, or two steps, side by side."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import isfinite

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.goodput_table import goodput_page
from meshwright.pages.tables.page_table import PageTable, percent, signed, signed_percent
from meshwright.pages.tables.waterfall import HFU_MEANS, NO_PEAK, NO_PEAK_OF_EXAMPLE, mfu_words
from meshwright.pages.tables.waterfall_lines import waterfall_page
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.finding import finding_lines
from meshwright.spec.run.run_comparison import RunComparison, RunSummary
from meshwright.spec.run.run_report import LEAST_STEPS, RunMetrics, RunReport
from meshwright.spec.step.comparison import Comparison, Operation, RankComparison, Side
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition
from meshwright.units import counted, first_of, format_bytes, format_count, format_duration, label_of


def run_page(report: RunReport, how_to_profile: str) -> Iterator[RenderableType]:
    """Yield the parts of the page: the layout, the waterfall up to the measured step, what is left unexplained."""
    yield f"[bold]{report.folder}[/], {layout_text(report.layout) or 'one rank'}"
    yield from untimed_words(report)
    yield ""
    yield from waterfall_page(report.waterfall, how_to_profile)
    if report.goodput is not None:
        yield ""
        yield from goodput_page(report.goodput)
        yield ""
    yield from map(escape, finding_lines(report.findings))
    not_finite = report.metrics.steps_not_finite
    if len(not_finite):
        yield not_finite_words(int(not_finite[0]), len(not_finite))
    yield from skipped_words(report.metrics)
    if report.predicted is None:
        return
    estimate, measured_s = report.predicted.estimate, report.measured_s
    total_s = estimate.step.total_s
    if report.example is None:
        yield difference_words(report)
    yield ""
    if estimate.mfu is None:
        yield NO_PEAK if report.example is None else NO_PEAK_OF_EXAMPLE
        return
    # The floor is the same work at the peak, so that a measured MFU is the predicted one on another step.
    measured = f"{percent(estimate.mfu * total_s / measured_s)} measured"
    yield f"MFU {measured}, {percent(estimate.mfu)} predicted. {mfu_words(report.manifest.job.precision.matmuls)}."
    if estimate.hfu is not None:
        yield f"HFU {percent(estimate.hfu * total_s / measured_s)} measured. {HFU_MEANS}."


def untimed_words(report: RunReport) -> Iterator[str]:
    """Yield that an earlier attempt than the newest is timed, and the layout of the newest, where they differ."""
    if (newest := report.untimed_layout) is None:
        return
    timed, attempts = report.metrics.timed_attempt, len(report.manifest.attempts)
    yield (
        f"Timed: attempt {timed} of {attempts}. The newest attempt trains in another layout, "
        f"{layout_text(newest) or 'one rank'}, and has fewer than the {LEAST_STEPS} steps that a step time takes."
    )


def difference_words(report: RunReport) -> str:
    """Return how far the predicted step is from the measured one."""
    assert report.predicted is not None
    assert report.predicted_s is not None
    return (
        f"predicted and measured differ by {percent(report.predicted_s / report.measured_s - 1)} of the measured step "
        f"(the interval is ±{percent(report.predicted.estimate.relative_error, 0)})"
    )


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
_COUNTS = ("num_steps", "num_ranks")
"""Whose change is none worth a figure where both are equal."""


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
        label, of_a, of_b = _sides(found, name)
        if of_a is None and of_b is None:
            continue
        cells = ("-" if value is None else form(value) for value in (of_a, of_b))
        table.add_row(label, *cells, _change(of_a, of_b) if _is_comparable(found, name) else "")
    yield table
    yield f"ranks, medians and peak memory: {_timed_words(found)}"
    for name, one in (("A", found.a), ("B", found.b)):
        if len(one.attempts) > 1:
            yield f"{name} was resumed: {attempt_words(one)}"
        if one.first_not_finite is not None:
            yield f"{name}: {not_finite_words(one.first_not_finite, one.num_not_finite)}"


def _sides(found: RunComparison, name: str) -> tuple[str, float | None, float | None]:
    """Return the label and both values of a row; of the loss those of the last step that both runs trained."""
    if name == "last_loss" and found.losses:
        last = found.losses[-1]
        return f"loss at step {last.step}", last.a, last.b
    steps = (found.a.validation_step, found.b.validation_step)
    at = f" at steps {steps[0]} and {steps[1]}" if name == "validation_loss" and not _is_comparable(found, name) else ""
    return f"{label_of(name)}{at}", getattr(found.a, name), getattr(found.b, name)


def _is_comparable(found: RunComparison, name: str) -> bool:
    """Return whether a row's change says something: losses are of one step, counts are not the same."""
    if name == "last_loss":
        return found.num_common_steps > 0
    if name == "validation_loss":
        steps = {found.a.validation_step, found.b.validation_step}
        return len(steps) == 1 or None in steps
    return name not in _COUNTS or getattr(found.a, name) != getattr(found.b, name)


def _change(of_a: float | None, of_b: float | None) -> str:
    """Return the relative change; "" where one is missing, and where a quotient says nothing."""
    if of_a is None or of_b is None or not of_a or not isfinite(of_a) or not isfinite(of_b):
        return ""
    return signed_percent(of_b / of_a - 1)


def not_finite_words(first_step: int, num_steps: int) -> str:
    """Return where the losses of a run are nan or infinite."""
    if num_steps == 1:
        return f"the loss of step {first_step} is not finite"
    return f"the losses of {num_steps:,} steps are not finite, the first at step {first_step}"


def skipped_words(metrics: RunMetrics) -> Iterator[str]:
    """Yield which updates of a run [guards] skipped, and how many in steps that a rollback or a restart cut off."""
    steps, num_cut_off = metrics.steps_skipped.tolist(), metrics.num_skips_cut_off
    if steps:
        were, where, them = ("was", "step", "it") if len(steps) == 1 else ("were", "steps", "them")
        numbers = first_of([*map(str, steps)], 10)
        yield (
            f"{len(steps):,} of {counted(len(metrics), 'update')} {were} skipped: {where} {numbers}; "
            f"goodput does not count {them}"
        )
    if num_cut_off:
        more, in_all = ("more ", f", {len(steps) + num_cut_off:,} in all") if steps else ("", "")
        were = "was" if num_cut_off == 1 else "were"
        where = "in steps that a rollback or a restart cut off"
        yield f"{counted(num_cut_off, f'{more}update')} {were} skipped {where}{in_all}"


def _timed_words(found: RunComparison) -> str:
    """Return which steps the figures are of, and whether those that warm up are among them."""
    sides = {"A": found.a, "B": found.b}
    words = ", ".join(f"{name} {one.timed_steps}" for name, one in sides.items())
    few = [name for name, one in sides.items() if one.are_few]
    if not few:
        return f"{words}, without the first after a start or a resume, which warm up"
    return (
        f"{words}; {' and '.join(few)} with steps that warm up after a start or a resume, since no attempt has "
        f"{LEAST_STEPS} steps"
    )


def attempt_words(summary: RunSummary) -> str:
    """Return which steps of a run were trained in which layout, on how many ranks."""
    parts = []
    for (num_ranks, layout), group in groupby(summary.attempts, key=lambda one: (one.num_ranks, one.layout)):
        same = list(group)
        first, last = same[0].first_step, same[-1].last_step
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        times = f", {len(same)} attempts" if len(same) > 1 else ""
        parts.append(f"{steps} on {counted(num_ranks, 'rank')} ({layout}{times})")
    return "; ".join(parts)


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
    trained = _trained_words(found)
    if found.first_difference is None:
        yield f"losses: bitwise equal in {counted(found.num_common_steps, 'step')} in common, {trained}"
        return
    in_common = f"{counted(found.num_common_steps, 'step')} in common"
    yield f"losses: first differ at step {found.first_difference}; {in_common}, {trained}"
    yield _loss_table(found)


def _trained_words(found: RunComparison) -> str:
    """Return whether both runs trained their common steps in one layout, without which equal losses prove nothing."""
    if found.first_other_layout is None:
        return "all trained in the same layout"
    return f"{found.num_other_layout} of them, from step {found.first_other_layout} on, trained in different layouts"


def _loss_table(found: RunComparison) -> Table:
    is_resumed = max(len(found.a.attempts), len(found.b.attempts)) > 1
    table = PageTable("step", "A#", "B#", "B - A#", *(("attempt of A#", "of B#") if is_resumed else ()))
    for one in found.losses:
        attempts = (f"{one.a_attempt}", f"{one.b_attempt}") if is_resumed else ()
        difference = f"{one.b - one.a:+.2e}" if isfinite(one.a) and isfinite(one.b) else ""
        table.add_row(f"{one.step}", f"{one.a:.5f}", f"{one.b:.5f}", difference, *attempts)
    return table


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
