"""A dry run as one HTML file that needs no network: plots that zoom, and the tables of the terminal's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.text import Text

from meshwright.extras import import_extra
from meshwright.report.dry_run_figures import exposed_figure, waterfall_figure
from meshwright.report.dry_run_memory import saving_cells, short_op
from meshwright.report.dry_run_table import (
    UNLESS,
    job_words,
    misfit_words,
    most_exposed,
    rank_seconds,
    rank_words,
    signed_change,
    tight_words,
    times,
    warnings_of,
)
from meshwright.report.stragglers_table import HEADERS, shown_stragglers, stragglers_words, straggling_cells
from meshwright.report.timeline_figures import PURPOSE, memory_figure, pipeline_figure, streams_figure
from meshwright.report.waterfall import MFU_MEANS, percent
from meshwright.spec.dry_run import CollectiveUse, DryRun, LiveTensors, Outcome, Padding, RankMemory
from meshwright.spec.timeline import Timeline
from meshwright.units import format_bytes, format_count, format_duration

_TEMPLATE = Path(__file__).with_name("dry_run.html")
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
_Cells = Sequence[str]


def write_html(run: DryRun, timeline: Timeline | None, file: Path) -> None:
    """Write the page to `file`; without an outcome, and so without a timeline, it says what is wrong."""
    plotly_js = import_extra("plotly.offline", PURPOSE).get_plotlyjs()
    parts = [*_head(run), *_problems(run)]
    if run.outcome is not None and timeline is not None:
        parts += [*_cards(run, run.outcome), *_misfit(run, run.outcome), *_time(run.outcome, timeline)]
        parts += [*_memory(run, run.outcome, timeline), *_communication(run.outcome), _ranks(run.outcome)]
        parts += _stragglers(run.outcome)
    parts += _padding(run.padding)
    page = Template(_TEMPLATE.read_text(encoding="utf-8"))
    title = escape(f"Dry run of {run.job}")
    file.write_text(page.substitute(title=title, plotly=plotly_js, body="\n".join(parts)), encoding="utf-8")


def _head(run: DryRun) -> Iterator[str]:
    yield f"<h1>{escape(run.model)} on {run.num_devices:,} x {escape(run.device)}</h1>"
    yield f"<p>A dry run on {escape(run.cluster)}: {escape(job_words(run))}.</p>"


def _problems(run: DryRun) -> Iterator[str]:
    if run.problems:
        listed = "".join(f"<li>{escape(str(problem))}</li>" for problem in run.problems)
        verdict = f"The step would hang or go wrong{UNLESS if run.guesses else ''}"
        yield f'<section class="bad"><h2>{verdict}</h2><ul class="pre">{listed}</ul></section>'
    for what, hazards in warnings_of(run).items():
        listed = "".join(f"<li>{escape(str(hazard))}</li>" for hazard in hazards)
        yield _section("Warnings", f"{what[0].upper()}{what[1:]}.", f'<ul class="pre">{listed}</ul>')
    if run.guesses:
        listed = "".join(f"<li>{escape(guess)}</li>" for guess in run.guesses)
        what = "What is run depends on numbers that fake tensors do not hold."
        yield _section("Guessed", what, f'<ul class="pre">{listed}</ul>')


def _cards(run: DryRun, outcome: Outcome) -> Iterator[str]:
    cards = {"step": format_duration(outcome.step_s)}
    if run.tokens_per_s is not None:
        cards["tokens/s"] = format_count(run.tokens_per_s)
        cards["tokens/s a device"] = f"{run.tokens_per_s / run.num_devices:,.0f}"
    if outcome.mfu is not None:
        cards["MFU"] = percent(outcome.mfu)
    held_bytes = 0 if outcome.fullest is None else outcome.fullest.reserved_bytes
    cards[f"memory of {format_bytes(run.usable_memory_bytes)}"] = format_bytes(held_bytes)
    yield '<div class="cards">'
    for name, value in cards.items():
        mark = " bad" if name.startswith("memory") and run.misfits else ""
        yield f'<div class="card{mark}"><b>{value}</b><span>{name}</span></div>'
    yield "</div>"


def _misfit(run: DryRun, outcome: Outcome) -> Iterator[str]:
    yield from (f"<p>{escape(Text.from_markup(words).plain)}</p>" for words in tight_words(run, outcome) if words)
    if not run.misfits:
        return
    listed = "".join(f"<li>{escape(misfit_words(rank, run))}</li>" for rank in run.misfits)
    rows = [
        (f"layout.{fix.change}", format_duration(fix.step_s), signed_change(fix.step_s, outcome))
        for fix in outcome.fixes
    ]
    fixes = _table(("what would make it fit", "step, by formula#", "#"), rows) if rows else ""
    yield f'<section class="bad"><h2>Out of memory</h2><ul>{listed}</ul>{fixes}</section>'


def _time(outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    means = f"{MFU_MEANS}." if outcome.mfu is not None else ""
    yield _section("Where the step goes", f"The mean over all ranks. {means}", _plot(waterfall_figure(outcome)))
    figure, cut_s = pipeline_figure(timeline)
    note = "What each rank computes, one rank of each kind. Draw a range to zoom, click twice to go back."
    yield _section("Ranks", note + _cut(cut_s), _plot(figure))
    figure, cut_s = streams_figure(timeline)
    note = "What the streams of one rank do: operations by kind, communication by mesh axis."
    yield _section("Streams of a rank", note + _cut(cut_s), _plot(figure))


def _cut(cut_s: float) -> str:
    return f" Runs of spans shorter than {format_duration(cut_s)} are not drawn." if cut_s > 0 else ""


def _memory(run: DryRun, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    fullest = outcome.fullest
    if fullest is None:
        return
    headers = ("rank", "pp#", "allocated#", "reserved#", "peak in", "module", "operation")
    rows = [
        (rank_words(rank), f"{rank.pipeline_rank}", format_bytes(rank.allocated_bytes), *_peak_cells(rank))
        for rank in outcome.memory
    ]
    usable = format_bytes(run.usable_memory_bytes)
    note = f"What tensors asked for by class, and what the allocator makes of it; a device can give {usable}."
    plot = _plot(memory_figure(timeline, run.usable_memory_bytes))
    yield _section("Memory", note, plot + _table(headers, rows))
    held = [
        (live.role.replace("_", " "), format_bytes(live.num_bytes), f"{live.count:,}", live.op, _where(live))
        for live in fullest.largest
    ]
    title = f"Rank {fullest.rank} at its peak"
    note = "What takes most of the fullest rank's memory, by the operation and the module that made it."
    yield _section(title, note, _table(("class", "bytes#", "tensors#", "made by", "in"), held))
    if outcome.savings:
        note = (
            "What of it is cheapest to do without, each line alone: computed again in backward, or moved to the host."
        )
        columns = ("bytes#", "tensors#", "computed again in#", "or moved in#", "made by", "in")
        yield _section("What it could do without", note, _table(columns, [*map(saving_cells, outcome.savings)]))


def _where(live: LiveTensors) -> str:
    return ", ".join(filter(None, (live.scope, live.line)))


def _peak_cells(rank: RankMemory) -> _Cells:
    return (format_bytes(rank.reserved_bytes), rank.phase, rank.scope or "-", rank.op)


def _communication(outcome: Outcome) -> Iterator[str]:
    if most_exposed(outcome):
        note = "Communication during which a rank computes nothing, the mean over all ranks; and what of it is hidden."
        listed = "".join(f"<li>{escape(text)}</li>" for text in outcome.suggestions)
        yield _section(
            "Exposed communication", note, _plot(exposed_figure(outcome)) + (listed and f"<ul>{listed}</ul>")
        )
    if outcome.collectives:
        headers = ("collective", "axis", "ranks#", "times#", "bytes#", "takes#", "exposed#")
        rows = [_collective_cells(one) for one in outcome.collectives]
        yield _section("Collectives", "What a rank takes part in, the mean over those that do.", _table(headers, rows))


def _collective_cells(one: CollectiveUse) -> _Cells:
    counts = (f"{one.num_ranks:,}", times(one.count), format_bytes(one.num_bytes))
    return short_op(one.op), one.axis or "-", *counts, format_duration(one.total_s), format_duration(one.exposed_s)


def _ranks(outcome: Outcome) -> str:
    rows = [
        (f"{one.rank}", f"{one.pipeline_rank}", *(percent(value / outcome.step_s) for value in rank_seconds(one.parts)))
        for one in outcome.ranks
    ]
    headers = ("rank#", "pp#", "computes#", "exposed#", "bubble#", "optimizer#", "host#")
    return _section("What each rank does", "Shares of the step.", _table(headers, rows))


def _stragglers(outcome: Outcome) -> Iterator[str]:
    if outcome.stragglers is not None:
        rows = [straggling_cells(one) for one in shown_stragglers(outcome.stragglers)]
        note = stragglers_words(outcome, outcome.stragglers)
        yield _section("Stragglers", f"{note[0].upper()}{note[1:]}.", _table(HEADERS, rows))


def _padding(padding: Padding | None) -> Iterator[str]:
    if padding is None or not padding.parameters:
        return
    rows = [
        (
            one.name,
            f"{one.rows:,}",
            f"{padding.num_shards:,}",
            f"{one.wire_factor:.3g} x",
            format_bytes(one.wasted_bytes),
        )
        for one in padding.parameters
    ]
    note = (
        "FSDP2 splits dim 0 and gives each rank as many rows as the first, which are gathered, too: of the whole model "
        f"{padding.wire_factor:.3g} times what there is. {format_bytes(padding.wasted_state_bytes)} of each rank's "
        "state is padding."
    )
    headers = ("parameter", "rows#", "shards#", "gathers#", "for nothing#")
    yield _section("Padding", note, _table(headers, rows))


def _section(title: str, note: str, inner: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p>{escape(note)}</p><div class="wide">{inner}</div></section>'


def _table(headers: _Cells, rows: Sequence[_Cells]) -> str:
    """Return a table; a header that ends in # is of numbers."""
    marks = [' class="number"' if header.endswith("#") else "" for header in headers]
    head = "".join(f"<th{mark}>{escape(text.rstrip('#'))}</th>" for mark, text in zip(marks, headers, strict=True))
    lines = ("".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _plot(figure: Any) -> str:
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    return text
