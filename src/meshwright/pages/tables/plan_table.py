"""A plan as a page for a terminal: the pick, its time and memory, other layouts, sensitivity."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, percent, signed_percent
from meshwright.pages.tables.plan_speedup import largest_speedup, unsearched_words
from meshwright.pages.tables.simulated_table import fastest_words, simulated_page, spaced
from meshwright.pages.tables.waterfall import HFU_MEANS, NO_PEAK, mfu_words, waterfall
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate, Contrast, Plan
from meshwright.spec.step.adapter import Adapter
from meshwright.spec.step.estimate import COMPONENT_NAMES, MEMORY_CLASSES, MemoryUse, tight_words
from meshwright.units import GiB, counted, format_bytes, format_count, format_duration, format_interval

FROZEN_FLOPS = "Model FLOPs: 4 a token for each frozen weight of a matmul, 6 for each that is trained, and attention's"
_MAX_ALTERNATIVES = 8
_MAX_COMPONENTS = 2


def plan_page(plan: Plan) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield from _request(plan)
    yield ""
    yield from _pick(plan)
    yield from simulated_page(plan)
    yield ""
    yield waterfall(plan.pick.estimate)
    means = (NO_PEAK,) if plan.pick.estimate.mfu is None else (mfu_words(plan.workload.precision), HFU_MEANS)
    if plan.num_trained_parameters is not None:
        means = (*means, FROZEN_FLOPS)
    yield "\n".join(f"[dim]{line}.[/]" for line in means)
    yield ""
    yield memory_table(plan.memory_by_pipeline_rank, plan.usable_memory_bytes)
    for part in plan_tables(plan):
        yield ""
        yield part
    yield ""
    yield largest_speedup(plan)


def plan_tables(plan: Plan) -> list[Table]:
    """Return the Pareto front, runners-up, alternatives, rejections, sensitivities and what-ifs, those that exist."""
    tables = (_pareto, _runners_up, _alternatives, _rejections, _sensitivities, _what_ifs)
    return [part for part in (table(plan) for table in tables) if part is not None]


def _request(plan: Plan) -> Iterator[str]:
    yield (
        f"[bold]{escape(plan.model)}[/], {format_count(plan.num_parameters)} parameters, on [bold]{plan.num_devices} x "
        f"{plan.device}[/] ({plan.cluster})"
    )
    yield from request_words(plan)


def request_words(plan: Plan) -> Iterator[str]:
    """Yield the workload, the stack, and the number of layouts scored."""
    workload = plan.workload
    precision = workload.precision + (f" ({escape(plan.precision_note)})" if plan.precision_note else "")
    yield (
        f"{counted(workload.global_batch_size, 'sequence')} x {workload.seq_len} tokens = "
        f"{format_count(workload.global_batch_tokens)} tokens a step, {precision}; stack: {plan.stack}"
    )
    if plan.num_trained_parameters is not None:
        yield f"trained: {adapter_words(workload.adapter, plan.num_trained_parameters)}"
    scored, fit = plan.layouts_scored, plan.layouts_that_fit
    yield f"{scored:,} layout{'s' * (scored != 1)} scored, {fit:,} fit{'s' * (fit == 1)}"
    if plan.kept:
        yield f"kept as set: {escape(', '.join(plan.kept))}"


def adapter_words(adapter: Adapter, num_trained: int) -> str:
    """Return what of a model is trained, and that all else is not."""
    base = "" if adapter.base_dtype == "compute" else f" in {adapter.base_dtype}"
    targets = escape(", ".join(adapter.targets))
    return (
        f"{format_count(num_trained)} parameters, {adapter.kind} of rank {adapter.rank} on {targets}; the model's own "
        f"stay as they are{base}"
    )


def _pick(plan: Plan) -> Iterator[RenderableType]:
    yield pick_table(plan)
    yield f"[green]{spaced(plan.pick.layout)}[/]"
    yield from pick_notes(plan)
    yield from given_words(plan)


def pick_table(plan: Plan) -> Table:
    """Return the step, MFU and memory of the pick and, where the job sets a layout, of that."""
    table = PageTable("", *_NUMBERS)
    table.columns[0].no_wrap = True
    table.add_row("[bold green]pick", *_numbers(plan.pick, plan))
    if plan.given is not None:
        *numbers, free = _numbers(plan.given, plan)
        table.add_row("given", *numbers, "over budget" if plan.given_misfit else free)
    return table


def given_words(plan: Plan) -> Iterator[str]:
    """Yield the layout that the job sets, and why it is invalid or beyond its memory budget, if it is."""
    if plan.given is not None:
        yield f"given: {spaced(plan.given.layout)}"
        if plan.keeps_given:
            gain = percent(1 - plan.given.step_s / plan.pick.step_s)
            yield f"given is {gain} faster than the pick: it has keys or values that are not searched; --write keeps it"
    if plan.given_refusal:
        yield f"given: invalid: {escape(plan.given_refusal)}"
    elif plan.given_misfit:
        yield f"given: [bold red]does not fit[/]: {escape(plan.given_misfit)}"


def pick_notes(plan: Plan) -> Iterator[str]:
    """Yield what attends, what the fastest layout and keys not searched would gain, and what no measured run backs."""
    if plan.attention:
        yield f"attention: {escape(plan.attention)}"
    if plan.fastest != plan.pick:
        yield fastest_words(plan)
    yield from unsearched_words(plan)
    if plan.pick.unmeasured:
        yield f"[yellow]not backed by a measured run[/]: {escape(', '.join(plan.pick.unmeasured))}"
    if plan.given is not None and 0 <= plan.given.headroom_bytes < plan.memory_margin * plan.usable_memory_bytes:
        left = f"{format_bytes(plan.given.headroom_bytes)} of the host's memory"
        if not plan.given.is_limited_by_host(plan.usable_memory_bytes):
            left = f"{percent(plan.given.headroom_bytes / plan.usable_memory_bytes)} of the memory"
        yield f"given leaves {left} free, picks {percent(plan.memory_margin)} (planner.memory_margin)"
    if plan.given is not None and plan.given.is_tight:
        needed_bytes = plan.given.estimate.memory.needed_bytes
        yield f"given: [bold yellow]tight[/]: {tight_words(needed_bytes, plan.usable_memory_bytes)}"


def _pareto(plan: Plan) -> Table:
    """Return step against free memory: the Pareto front, the pick, and FSDP alone."""
    table = PageTable("Pareto front: step against memory", "step#", "vs pick#", "free#")
    rows = [("", row) for row in plan.pareto_front]
    if plan.fsdp_alone is not None:
        rows.append(("FSDP alone: ", plan.fsdp_alone))
    for words, row in rows:
        table.add_row(f"{words}{spaced(row.layout)}", *_step_and_free(row, plan))
    if plan.fsdp_alone is None:
        table.add_row(f"FSDP alone: {escape(plan.fsdp_alone_refusal)}", "-", "-", "-")
    return table


def _step_and_free(row: Candidate, plan: Plan) -> tuple[str, str, str]:
    """Return the step, its change from the pick's, and the free memory, negative where it is missing."""
    return format_duration(row.estimate.step.total_s), _versus(row, plan.pick), _free(row)


def _free(row: Candidate) -> str:
    """Return the free memory of the fullest rank, negative where it is missing."""
    return f"{'-' if row.free_bytes < 0 else ''}{format_bytes(abs(row.free_bytes))}"


_NUMBERS = ("step#", "80 % interval#", "tokens/s/device#", "MFU#", "HFU#", "free#")


def _numbers(candidate: Candidate, plan: Plan) -> list[str]:
    step_s, estimate = candidate.estimate.step.total_s, candidate.estimate
    rate = plan.workload.global_batch_tokens / step_s / plan.num_devices
    return [
        *format_interval(step_s, estimate.relative_error),
        f"{rate:,.0f}",
        "-" if estimate.mfu is None else percent(estimate.mfu),
        "-" if estimate.hfu is None else percent(estimate.hfu),
        _free(candidate),
    ]


def _runners_up(plan: Plan) -> Table:
    """Return the best layout of each other parallelism, next to the pick."""
    table = PageTable("", "layout", "step#", "vs pick#", "free#")
    table.title = "runners-up: best of each parallel layout"
    table.columns[0].no_wrap = True
    for place, row in enumerate((plan.pick, *plan.runners_up)):
        name, style = ("pick", "green") if place == 0 else (str(place + 1), None)
        table.add_row(name, spaced(row.layout), *_step_and_free(row, plan), style=style)
    return table


def _versus(row: Candidate, pick: Candidate) -> str:
    return "" if row is pick else signed_percent(row.estimate.step.total_s / pick.estimate.step.total_s - 1)


def _alternatives(plan: Plan) -> Table | None:
    if not plan.alternatives:
        return None
    table = PageTable("alternatives: best layout with", "vs pick#", "change by component")
    # One layout may be the best with other values of several keys.
    grouped: dict[str, list[Contrast]] = {}
    for contrast in plan.alternatives:
        grouped.setdefault(layout_text(contrast.other.layout), []).append(contrast)
    for same in list(grouped.values())[:_MAX_ALTERNATIVES]:
        # Two keys may name the axis that they both need.
        changed = ", ".join(dict.fromkeys(part for contrast in same for part in contrast.change.split(", ")))
        table.add_row(changed, _versus(same[0].other, plan.pick), _causes(same[0], plan))
    return table


def _causes(contrast: Contrast, plan: Plan) -> str:
    """Return the components that differ most."""
    total_s = plan.pick.estimate.step.total_s
    worst = sorted(contrast.change_by_component_s.items(), key=lambda item: -abs(item[1]))[:_MAX_COMPONENTS]
    changes = (f"{COMPONENT_NAMES[name]} {signed_percent(seconds / total_s)}" for name, seconds in worst)
    return ", ".join(changes) or "nothing"


def _rejections(plan: Plan) -> Table | None:
    if not plan.rejections:
        return None
    table = PageTable("rejections: pick with", "vs pick#", "reason, and fixes (vs pick)")
    pick_s = plan.pick.estimate.step.total_s
    for rejection in plan.rejections:
        fixes = "; ".join(f"{fix.change} ({signed_percent(fix.step_s / pick_s - 1)})" for fix in rejection.fixes)
        change = "-" if rejection.step_s is None else signed_percent(rejection.step_s / pick_s - 1)
        table.add_row(rejection.change, change, escape(rejection.reason) + (f". Fits with {fixes}" if fixes else ""))
    return table


def _sensitivities(plan: Plan) -> Table | None:
    if not plan.sensitivities:
        return None
    table = PageTable("sensitivities: with hardware", "change#", "pick change#", "best then")
    names = {layout_text(row.layout): f"layout {place}" for place, row in enumerate(plan.runners_up, start=2)}
    for one in plan.sensitivities:
        is_other = one.best_change < one.pick_change - 1e-4
        name = names.get(layout_text(one.best), spaced(one.best))
        other = f"{name}: {signed_percent(one.best_change)}" if is_other else "pick"
        table.add_row(one.what, f"{100 * one.change:+.0f} %", signed_percent(one.pick_change), other)
    return table


def _what_ifs(plan: Plan) -> Table | None:
    if not plan.what_ifs:
        return None
    table = PageTable("what if", "vs pick#", "note")
    for what_if in plan.what_ifs:
        table.add_row(what_if.change, _versus(what_if.best, plan.pick), what_if.note)
    return table


_MAX_RANKS = 4


def memory_table(ranks: Sequence[MemoryUse], usable_bytes: int) -> Table:
    """Return the classes of memory by pipeline rank, in GiB; of many ranks the first, the fullest and the last.

    Their sum is what the allocator reserves, of `usable_bytes`: what context and communicators leave of the device.
    """
    shown = _shown(ranks)
    names = ("every rank" if len(ranks) == 1 else f"pp rank {rank}" for rank in shown)
    table = PageTable("memory by class, GiB", *(f"{name}#" for name in names))
    for name, label in MEMORY_CLASSES.items():
        values = [getattr(ranks[rank], name) for rank in shown]
        if any(values) and name != "context_bytes":
            table.add_row(label, *(_gib(value) for value in values))
    table.add_row("[bold]reserved", *(f"[bold]{_gib(ranks[rank].reserved_bytes)}" for rank in shown))
    left = [usable_bytes - ranks[rank].reserved_bytes for rank in shown]
    table.add_row(
        f"free of {_gib(usable_bytes)}", *(f"{_gib(value)} ({percent(value / usable_bytes, 0)})" for value in left)
    )
    return table


def _shown(ranks: Sequence[MemoryUse]) -> list[int]:
    if len(ranks) <= _MAX_RANKS:
        return list(range(len(ranks)))
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].reserved_bytes)
    return sorted({0, fullest, len(ranks) // 2, len(ranks) - 1})


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GiB:.2f}"
