"""A simulation as a page for a terminal: problems first, then time, memory, communication, ranks and padding."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, labels_of, percent, signed, signed_percent
from meshwright.pages.tables.simulation_memory import (
    largest_table,
    merge_identical,
    most_held,
    rank_memory_table,
    savings_table,
    short_op,
    shown_ranks,
)
from meshwright.pages.tables.stragglers_table import predicted_words, stragglers_parts
from meshwright.pages.tables.waterfall import MFU_MEANS
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition, tight_words
from meshwright.spec.step.simulation_report import ExposedAt, Outcome, Padding, RankMemory, SimulationReport
from meshwright.spec.trace.trace_problem import Hazard
from meshwright.units import counted, format_bytes, format_count, format_duration, label_of

_MOST_ROWS = 10
_SHARD = "fully_shard() its modules over more ranks, or hold them in fewer bits"
_MAKE_LESS = "make these tensors smaller, in parts, or on the host, and drop each once it is used"
_ADVICE = {
    "parameter": _SHARD,
    "gradient": _SHARD,
    "optimizer_state": _SHARD,
    "unsharded_parameter": "fully_shard() each block by itself, with reshard_after_forward=True",
    "activation": "torch.utils.checkpoint the blocks, or use fewer tokens per microbatch",
}
"""What makes a program hold less, by TensorRole."""
_LEAST_SHARE = 0.0005
_MOST_TIMES = 10.0
"""Up to which a component is compared with its prediction in per cent."""
"""Of the step: what takes less is not worth a line."""
RANK_TIMES = ("compute_s", "exposed_s", "pipeline_bubble_s", "optimizer_s", "cpu_bound_s")
"""What a rank's time is shared by: recomputation is computing, data loading is the host's."""
PADDING = ("rows", "num_shards", "wire_factor", "wasted_bytes")
UNLESS = ", if the guesses below are right"
"""Added to a verdict that may follow from a guess."""


def warnings_of(run: SimulationReport) -> dict[str, list[Hazard]]:
    """Return the hazards of a simulation by what they mean for the step."""
    by_meaning = {
        "the step ends, and its result depends on timing (data race)": [one for one in run.hazards if one.is_race],
        "the simulated step ends; with NCCL it may hang or exchange wrong tensors": [
            one for one in run.hazards if not one.is_race
        ],
    }
    return {what: hazards for what, hazards in by_meaning.items() if hazards}


def simulation_page(run: SimulationReport) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield from _request(run)
    if run.problems:
        yield ""
        yield f"[bold red]the step deadlocks or fails[/]{UNLESS if run.guesses else ''}"
        yield from _listed("red", [escape(str(one)) for one in run.problems], ", which the first ones may explain")
    for what, hazards in warnings_of(run).items():
        yield ""
        yield f"[bold yellow]warnings[/]: {what}"
        yield from _listed("yellow", [escape(str(hazard)) for hazard in hazards])
    if run.guesses:
        yield ""
        yield "[bold yellow]guessed[/]: control flow depends on tensor values, which fake tensors do not hold"
        yield from _listed("yellow", [escape(guess) for guess in run.guesses])
    tables = [_padding_table(run.padding)]
    if run.outcome is not None:
        yield from _misfit(run, run.outcome)
        yield from tight_lines(run, run.outcome)
        yield ""
        yield _parts_table(run.outcome)
        yield ""
        yield from _speed(run, run.outcome)
        yield from stragglers_parts(run.outcome)
        tables = [
            rank_memory_table(run, run.outcome),
            largest_table(run.outcome),
            savings_table(run.outcome),
            _exposed_table(run.outcome),
            _collective_table(run.outcome),
        ]
        tables += [_rank_table(run.outcome), _padding_table(run.padding)]
    for table in tables:
        if table.row_count:
            yield ""
            yield table
    if run.outcome is not None and run.outcome.suggestions:
        yield ""
        yield from (f"- {escape(text)}" for text in run.outcome.suggestions)


def _listed(colour: str, texts: Sequence[str], of_more: str = "") -> Iterator[str]:
    """Yield a line for each text, of many the first, and how many more there are."""
    yield from (f"[{colour}]-[/] {text}" for text in texts[:_MOST_ROWS])
    if len(texts) > _MOST_ROWS:
        yield f"[{colour}]-[/] and {len(texts) - _MOST_ROWS} more{of_more}"


def _request(run: SimulationReport) -> Iterator[str]:
    yield f"[bold]{escape(run.model)}[/] on [bold]{run.num_devices} x {run.device}[/] ({run.cluster})"
    yield f"[dim]{escape(job_words(run))}[/]"
    if run.layout is None and run.num_traced < run.num_devices:
        traced = f"{run.num_traced:,} of {run.num_devices:,} ranks"
        unseen = "an error on one of the others is not found (--every-rank traces all)"
        yield f"[dim]{traced} were traced{_which(run)}; {unseen}[/]"


def _which(run: SimulationReport) -> str:
    """Return the ranks that were traced, such as ": 0-8, 63, 511"; "" where that is not known."""
    runs = np.split(run.traced_ranks, np.flatnonzero(np.diff(run.traced_ranks) != 1) + 1) if run.traced_ranks else []
    words = ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in runs)
    return words and f": {words}"


def job_words(run: SimulationReport) -> str:
    """Return what is simulated: the job, its step and its layout."""
    words = [run.job]
    if run.workload is not None:
        words.append(f"{format_count(run.workload.global_batch_tokens)} tokens a step, {run.workload.precision}")
    if run.layout is not None:
        words.append(layout_text(run.layout).replace(",", ", ") or "one rank")
    return "; ".join(words)


def _misfit(run: SimulationReport, outcome: Outcome) -> Iterator[RenderableType]:
    """Yield which ranks do not fit, and what would make them; nothing where all do."""
    if not run.misfits:
        return
    yield ""
    yield f"[bold red]out of memory[/]: a device has {format_bytes(run.usable_memory_bytes)} of usable memory"
    yield from _listed("red", [misfit_words(rank, run) for rank in run.misfits])
    yield ""
    if run.layout is None:
        yield _advice(max(run.misfits, key=lambda rank: rank.reserved_bytes))
        return
    if outcome.predicted is None and not outcome.fixes:
        yield "no change is listed: the cost formulas do not cover this model or schedule"
        return
    if not outcome.fixes:
        yield "no change of one key of \\[layout] frees enough: use more devices, or devices with more memory"
        return
    table = PageTable("changes that make it fit", "predicted step#", "#")
    for fix in outcome.fixes:
        table.add_row(fix.change, format_duration(fix.step_s), signed_change(fix.step_s, outcome))
    yield table
    if any("activation_checkpoint" in fix.change for fix in outcome.fixes):
        yield '[dim]layout.activation_checkpoint = "auto" recomputes as few blocks as the traced step needs[/]'


def tight_lines(run: SimulationReport, outcome: Outcome) -> Iterator[str]:
    """Yield what to know of a step that fits although its formula needs more than a device has."""
    needed_bytes = 0 if outcome.predicted is None else outcome.predicted.memory.needed_bytes
    if needed_bytes > run.usable_memory_bytes and not run.misfits:
        yield ""
        yield f"[bold yellow]tight[/]: {tight_words(needed_bytes, run.usable_memory_bytes)}"


def misfit_words(rank: RankMemory, run: SimulationReport) -> str:
    """Return what a rank needs, and by how much that is more than its device has."""
    missing = format_bytes(rank.reserved_bytes - run.usable_memory_bytes)
    words = f"{rank_words(rank)} needs {format_bytes(rank.reserved_bytes)}: {missing} are missing"
    return f"{words}; {most}" if run.layout is None and (most := most_held(rank)) else words


def _advice(rank: RankMemory) -> str:
    """Return what would make a program fit, by what takes most of a rank's memory."""
    most = max(rank.by_role, key=lambda role: rank.by_role[role])
    return f"{_ADVICE.get(most, _MAKE_LESS)}; or take devices with more memory"


def signed_change(step_s: float, outcome: Outcome) -> str:
    """Return by how much a step that a formula says is longer than what it says of this one."""
    return "" if outcome.predicted is None else signed_percent(step_s / outcome.predicted.step.total_s - 1)


def rank_words(rank: RankMemory) -> str:
    """Return the rank, and the number of other ranks of its class."""
    others = rank.num_ranks - 1
    return f"rank {rank.rank}" + (f" (and {counted(others, 'identical rank')})" if others else "")


def _parts_table(outcome: Outcome) -> Table:
    """Return the step by component, next to the formulas' where they know the model."""
    predicted = (f"{predicted_words(outcome)}#", "vs predicted#") if outcome.predicted_parts else ()
    table = PageTable("where the step goes", "simulated#", "share#", *predicted)
    stragglers_s = 0.0 if outcome.predicted is None else outcome.predicted.step.stragglers_s
    for name in COMPONENTS:
        seconds = getattr(outcome.parts, name)
        predicted_s = None if outcome.predicted_parts is None else getattr(outcome.predicted_parts, name)
        if name == "other_communication_s" and predicted_s is not None:
            predicted_s = max(0.0, predicted_s - stragglers_s)
        if max(seconds, predicted_s or 0.0) < _LEAST_SHARE * outcome.step_s:
            continue
        share = percent(seconds / outcome.step_s)
        table.add_row(COMPONENT_NAMES[name], format_duration(seconds), share, *_compared(seconds, predicted_s))
        if name == "compute_s":
            for kind, kind_s in outcome.compute.items():
                cells: tuple[str, ...] = (f"  {kind}", format_duration(kind_s), percent(kind_s / outcome.step_s))
                table.add_row(*cells, style="dim")
        if name == "cpu_bound_s" and outcome.fixed_cpu_bound_s:
            fixed_s, name = outcome.fixed_cpu_bound_s, label_of("fixed_cpu_bound_s")
            table.add_row(f"  {name}", format_duration(fixed_s), percent(fixed_s / outcome.step_s), style="dim")
    if stragglers_s >= _LEAST_SHARE * outcome.step_s:
        # Ranks of a traced step are equal, unless --jitter or --slow-rank makes them wait in collectives of any axis.
        table.add_row(COMPONENT_NAMES["stragglers_s"], "-", "-", format_duration(stragglers_s), "-")
    total_s = None if outcome.predicted_parts is None else outcome.predicted_parts.total_s
    cells = ("step", format_duration(outcome.step_s), "100 %", *_compared(outcome.step_s, total_s))
    table.add_row(*(f"[bold]{cell}" for cell in cells))
    return table


def _compared(took_s: float, predicted_s: float | None) -> tuple[str, ...]:
    if predicted_s is None:
        return ()
    # Per cent of next to nothing, as of CPU-bound in small models, say less than the difference.
    is_relative = predicted_s > 0 and took_s < _MOST_TIMES * predicted_s
    return format_duration(predicted_s), signed_percent(took_s / predicted_s - 1) if is_relative else signed(
        took_s - predicted_s
    )


def _speed(run: SimulationReport, outcome: Outcome) -> Iterator[str]:
    if run.tokens_per_s is not None:
        words = f"{format_count(run.tokens_per_s)} tokens/s, {run.tokens_per_s / run.num_devices:,.0f} a device"
        yield words if outcome.mfu is None else f"{words}, MFU {percent(outcome.mfu)}"
    if outcome.mfu is not None:
        yield f"[dim]{MFU_MEANS}.[/]"


def _exposed_table(outcome: Outcome) -> Table:
    table = PageTable("exposed#", "share#", "hidden#", "count#", "collective")
    for one in most_exposed(outcome):
        table.add_row(
            format_duration(one.exposed_s),
            percent(one.exposed_s / outcome.step_s),
            percent(one.hidden_s / max(one.exposed_s + one.hidden_s, 1e-12), 0),
            times(one.count),
            f"{one.axis} {short_op(one.op)} in {one.phase} {escape(one.scope)}".strip(),
        )
    return table


def times(count: float) -> str:
    """Return how often a rank does something: the mean over ranks of what only some do can be less than once."""
    return f"{count:,.0f}" if count >= 1 or not count else f"{count:.2g}"


def most_exposed(outcome: Outcome) -> list[ExposedAt]:
    """Return where communication is exposed enough to be seen, most first."""
    least_s = _LEAST_SHARE / 10 * outcome.step_s
    return [one for one in outcome.exposed if one.exposed_s >= least_s][:_MOST_ROWS]


def _collective_table(outcome: Outcome) -> Table:
    table = PageTable("collective", *labels_of("num_ranks", "count", "num_bytes", "total_s", "exposed_s"))
    for one in outcome.collectives:
        table.add_row(
            f"{one.axis} {short_op(one.op)}".strip(),
            f"{one.num_ranks:,}",
            times(one.count),
            format_bytes(one.num_bytes),
            format_duration(one.total_s),
            format_duration(one.exposed_s),
        )
    return table


def _rank_table(outcome: Outcome) -> Table:
    has_stages = any(rank.pipeline_rank for rank in outcome.ranks)
    stage_rank = ("pipeline_rank",) if has_stages else ()
    table = PageTable(*labels_of("rank", "num_ranks", *stage_rank, *RANK_TIMES))
    rows = []
    for rank in outcome.ranks:
        stage = [f"{rank.pipeline_rank}"] if has_stages else []
        shares = (percent(value / outcome.step_s) for value in rank_seconds(rank.parts))
        rows.append((rank.rank, rank.num_ranks, (*stage, *shares)))
    for first, num_ranks, cells in shown_ranks(merge_identical(rows)):
        table.add_row(f"{first}", f"{num_ranks:,}", *cells)
    return table


def rank_seconds(parts: StepDecomposition) -> tuple[float, ...]:
    """Return what a rank computes, what communication it waits for, its bubble, optimizer and host, seconds."""
    host_s = parts.cpu_bound_s + parts.data_loading_s
    return parts.compute_s + parts.recomputation_s, parts.exposed_s, parts.pipeline_bubble_s, parts.optimizer_s, host_s


def _padding_table(padding: Padding | None) -> Table:
    """Return which parameters are padded, and what that costs in all; empty where nothing is to be said."""
    table = PageTable("padded by FSDP2", *labels_of(*PADDING))
    if padding is None or not padding.parameters:
        return table
    for one in padding.parameters[:_MOST_ROWS]:
        cells = (f"{one.rows:,}", f"{padding.num_shards:,}", f"{one.wire_factor:.3g} x", format_bytes(one.wasted_bytes))
        table.add_row(escape(one.name), *cells)
    table.add_row("[bold]whole model", "", "", f"[bold]{padding.wire_factor:.3g} x", "", style=None)
    table.caption = f"{format_bytes(padding.wasted_state_bytes)} of each rank's state is padding"
    return table
