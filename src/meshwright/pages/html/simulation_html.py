"""A simulation as one HTML file that needs no network: interactive plots, and the tables of the terminal's page."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from meshwright.pages.figures.run_figures import exposed_figure, outcome_figure
from meshwright.pages.figures.timeline_figures import memory_figure, pipeline_figure, streams_figure
from meshwright.pages.html.html_page import cards, paragraph, plot, section, table, write_page
from meshwright.pages.tables.page_table import labels_of, percent
from meshwright.pages.tables.simulation_memory import role_words, saving_cells, short_op
from meshwright.pages.tables.simulation_table import (
    PADDING,
    RANK_TIMES,
    UNLESS,
    job_words,
    misfit_words,
    most_exposed,
    rank_seconds,
    rank_words,
    signed_change,
    tight_lines,
    times,
    warnings_of,
)
from meshwright.pages.tables.stragglers_table import HEADERS, shown_stragglers, stragglers_words, straggling_cells
from meshwright.pages.tables.waterfall import MFU_MEANS
from meshwright.spec.step.simulation_report import (
    CollectiveUse,
    LiveTensors,
    Outcome,
    Padding,
    RankMemory,
    SimulationReport,
)
from meshwright.spec.trace.timeline import Timeline
from meshwright.units import format_bytes, format_count, format_duration

_Cells = Sequence[str]


def write_html(run: SimulationReport, timeline: Timeline | None, file: Path) -> None:
    """Write the page to `file`; without an outcome, and so without a timeline, it says what is wrong."""
    parts = [*_head(run), *_problems(run)]
    if run.outcome is not None and timeline is not None:
        parts += [*_cards(run, run.outcome), *_misfit(run, run.outcome), *_time(run.outcome, timeline)]
        parts += [*_memory(run, run.outcome, timeline), *_communication(run.outcome), _ranks(run.outcome)]
        parts += _stragglers(run.outcome)
    parts += _padding(run.padding)
    write_page(f"Simulation of {run.job}", parts, file)


def _head(run: SimulationReport) -> Iterator[str]:
    yield f"<h1>{escape(run.model)} on {run.num_devices:,} x {escape(run.device)}</h1>"
    yield f"<p>A simulation on {escape(run.cluster)}: {escape(job_words(run))}.</p>"


def _problems(run: SimulationReport) -> Iterator[str]:
    if run.problems:
        listed = "".join(f"<li>{escape(str(problem))}</li>" for problem in run.problems)
        verdict = f"The step deadlocks or fails{UNLESS if run.guesses else ''}"
        yield f'<section class="bad"><h2>{verdict}</h2><ul class="pre">{listed}</ul></section>'
    for what, hazards in warnings_of(run).items():
        listed = "".join(f"<li>{escape(str(hazard))}</li>" for hazard in hazards)
        yield section("Warnings", f"{what[0].upper()}{what[1:]}.", f'<ul class="pre">{listed}</ul>')
    if run.guesses:
        listed = "".join(f"<li>{escape(guess)}</li>" for guess in run.guesses)
        what = "Control flow depends on tensor values, which fake tensors do not hold."
        yield section("Guessed", what, f'<ul class="pre">{listed}</ul>')


def _cards(run: SimulationReport, outcome: Outcome) -> Iterator[str]:
    named = {"step": format_duration(outcome.step_s)}
    if run.tokens_per_s is not None:
        named["tokens/s"] = format_count(run.tokens_per_s)
        named["tokens/s a device"] = f"{run.tokens_per_s / run.num_devices:,.0f}"
    if outcome.mfu is not None:
        named["MFU"] = percent(outcome.mfu)
    held_bytes = 0 if outcome.fullest is None else outcome.fullest.reserved_bytes
    named[f"memory of {format_bytes(run.usable_memory_bytes)}"] = format_bytes(held_bytes)
    yield cards(named, bad="memory" if run.misfits else "")


def _misfit(run: SimulationReport, outcome: Outcome) -> Iterator[str]:
    yield from (paragraph(words) for words in tight_lines(run, outcome) if words)
    if not run.misfits:
        return
    listed = "".join(f"<li>{escape(misfit_words(rank, run))}</li>" for rank in run.misfits)
    rows = [(fix.change, format_duration(fix.step_s), signed_change(fix.step_s, outcome)) for fix in outcome.fixes]
    fixes = table(("changes that make it fit", "predicted step#", "#"), rows) if rows else ""
    yield f'<section class="bad"><h2>Out of memory</h2><ul>{listed}</ul>{fixes}</section>'


def _time(outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    means = f"{MFU_MEANS}." if outcome.mfu is not None else ""
    yield section("Where the step goes", f"The mean over all ranks. {means}", plot(outcome_figure(outcome)))
    figure, cut_s = pipeline_figure(timeline)
    note = "Computation of each rank, one rank per class. Drag to zoom, double-click to reset."
    yield section("Ranks", note + _cut(cut_s), plot(figure))
    figure, cut_s = streams_figure(timeline)
    note = "Streams of one rank: operations by kind, communication by mesh axis."
    yield section("Streams of a rank", note + _cut(cut_s), plot(figure))


def _cut(cut_s: float) -> str:
    return f" Spans shorter than {format_duration(cut_s)} are not drawn." if cut_s > 0 else ""


def _memory(run: SimulationReport, outcome: Outcome, timeline: Timeline) -> Iterator[str]:
    fullest = outcome.fullest
    if fullest is None:
        return
    headers = ("rank", *labels_of("pipeline_rank", "allocated_bytes", "reserved_bytes"), "phase", "scope", "op")
    rows = [
        (rank_words(rank), f"{rank.pipeline_rank}", format_bytes(rank.allocated_bytes), *_peak_cells(rank))
        for rank in outcome.memory
    ]
    usable = format_bytes(run.usable_memory_bytes)
    note = f"By tensor class; the lines are what the caching allocator has allocated and reserved, of {usable} usable."
    curves = plot(memory_figure(timeline, run.usable_memory_bytes))
    yield section("Memory", note, curves + table(headers, rows))
    held = [
        (role_words(live.role), format_bytes(live.num_bytes), f"{live.num_tensors:,}", live.op, _where(live))
        for live in fullest.largest
    ]
    title = f"Rank {fullest.rank} at its peak"
    note = "Live tensors of the fullest rank, by the operation and the module that allocated them."
    yield section(title, note, table(("role", *labels_of("num_bytes", "num_tensors"), "op", "scope"), held))
    if outcome.savings:
        note = "Tensors that are cheapest to recompute in backward or to offload to the host; rows are independent."
        columns = (*labels_of("num_bytes", "num_tensors", "recompute_s", "offload_s"), "op", "scope")
        yield section("Recompute and offload candidates", note, table(columns, [*map(saving_cells, outcome.savings)]))


def _where(live: LiveTensors) -> str:
    return ", ".join(filter(None, (live.scope, live.line)))


def _peak_cells(rank: RankMemory) -> _Cells:
    return (format_bytes(rank.reserved_bytes), rank.phase, rank.scope or "-", rank.op)


def _communication(outcome: Outcome) -> Iterator[str]:
    if most_exposed(outcome):
        note = "Communication by place, exposed and hidden behind computation; mean over all ranks."
        listed = "".join(f"<li>{escape(text)}</li>" for text in outcome.suggestions)
        yield section("Exposed communication", note, plot(exposed_figure(outcome)) + (listed and f"<ul>{listed}</ul>"))
    if outcome.collectives:
        headers = ("op", "axis", *labels_of("num_ranks", "count", "num_bytes", "total_s", "exposed_s"))
        rows = [_collective_cells(one) for one in outcome.collectives]
        yield section("Collectives", "Mean over the ranks that take part.", table(headers, rows))


def _collective_cells(one: CollectiveUse) -> _Cells:
    counts = (f"{one.num_ranks:,}", times(one.count), format_bytes(one.num_bytes))
    return short_op(one.op), one.axis or "-", *counts, format_duration(one.total_s), format_duration(one.exposed_s)


def _ranks(outcome: Outcome) -> str:
    rows = [
        (f"{one.rank}", f"{one.pipeline_rank}", *(percent(value / outcome.step_s) for value in rank_seconds(one.parts)))
        for one in outcome.ranks
    ]
    headers = labels_of("rank", "pipeline_rank", *RANK_TIMES)
    return section("Time by rank", "Shares of the step.", table(headers, rows))


def _stragglers(outcome: Outcome) -> Iterator[str]:
    if outcome.stragglers is not None:
        rows = [straggling_cells(one) for one in shown_stragglers(outcome.stragglers)]
        note = stragglers_words(outcome, outcome.stragglers)
        yield section("Stragglers", f"{note[0].upper()}{note[1:]}.", table(HEADERS, rows))


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
        "FSDP2 shards dim 0 and pads each shard to the size of the first; all-gathers move the padding too: "
        f"{padding.wire_factor:.3g} times the model's bytes. {format_bytes(padding.wasted_state_bytes)} of each "
        "rank's state is padding."
    )
    yield section("Padding", note, table(("parameter", *labels_of(*PADDING)), rows))
