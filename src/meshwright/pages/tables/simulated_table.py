"""The simulated finalists of a plan, formulas next to simulation; and the layout that formulas call fastest."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from meshwright.pages.tables.page_table import PageTable, percent, signed_percent
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate, Plan
from meshwright.units import format_bytes, format_duration


def simulated_page(plan: Plan) -> Iterator[RenderableType]:
    """Yield the simulated finalists, fastest first, and why others dropped out; nothing where none was simulated."""
    kept = [one for one in (plan.pick, *plan.runners_up) if one.simulated is not None]
    if not kept:
        return
    table = PageTable("simulated finalists", "step#", "simulated#", "#", "memory#", "simulated#", "#")
    named = [("pick" if one is plan.pick else str(place), one) for place, one in enumerate((*kept, *plan.dropped), 1)]
    for name, one in named:
        table.add_row(name, *_figures(one), style="green" if one is plan.pick else None)
    yield ""
    yield table
    # Next to six columns of figures 80 columns leave a layout less than the width of its longest key and value.
    for name, one in named:
        why = why_dropped(one, plan.usable_memory_bytes)
        yield f"{name}: {spaced(one.layout)}" + (f": [red]dropped[/]: {escape(why)}" if why else "")


def why_dropped(candidate: Candidate, usable_bytes: int) -> str | None:
    """Return why a finalist cannot be picked, by its simulation; None where it can."""
    step = candidate.simulated
    assert step is not None
    if step.fullest_bytes is None:
        return step.problem or "it has no step"
    missing = step.fullest_bytes - usable_bytes
    if missing <= 0:
        return None
    rank = step.reserved_bytes.index(step.fullest_bytes)
    who = f"pipeline rank {rank}" if len(step.reserved_bytes) > 1 else "a rank"
    return f"{who} needs {format_bytes(step.fullest_bytes)}: {format_bytes(missing)} are missing"


def _figures(candidate: Candidate) -> list[str]:
    step, planned = candidate.simulated, candidate.estimate
    assert step is not None
    planned_s, planned_bytes = planned.step.total_s, planned.memory.reserved_bytes
    cells = [format_duration(planned_s), "-", "-", format_bytes(planned_bytes), "-", "-"]
    if step.step_s is not None and step.fullest_bytes is not None:
        cells[1:3] = format_duration(step.step_s), signed_percent(step.step_s / planned_s - 1)
        cells[4:6] = format_bytes(step.fullest_bytes), signed_percent(step.fullest_bytes / planned_bytes - 1)
    return cells


def spaced(layout: Layout) -> str:
    """Return a layout in one line that may break between its keys."""
    return escape(layout_text(layout.effective).replace(",", ", "))


def fastest_words(plan: Plan) -> str:
    """Return the layout with the shortest predicted step, which is not the pick, and why it was not picked."""
    gain = 1 - plan.fastest.step_s / plan.pick.step_s
    words = f"{spaced(plan.fastest.layout)}: predicted {percent(gain)} faster than the pick, {_memory_needed(plan)}"
    picked = plan.pick.simulated
    if picked is None or picked.step_s is None:
        simplest = "the simplest layout within the error of ranking"
        reason = simplest if plan.is_simpler else "as simple and leaves more memory"
        return f"fastest of those searched: {words}; the pick is {reason}"
    name = layout_text(plan.fastest.layout)
    known = (one for one in (*plan.runners_up, *plan.dropped) if one.simulated and layout_text(one.layout) == name)
    seen = next(known, None)
    if seen is None or seen.simulated is None:
        return f"fastest by the formulas: {words}; it was not simulated, and the pick is one of those that were"
    if (why := why_dropped(seen, plan.usable_memory_bytes)) is not None or seen.simulated.step_s is None:
        return f"fastest by the formulas: {words}; dropped when simulated: {escape(why or 'it has no step')}"
    change = signed_percent(seen.simulated.step_s / picked.step_s - 1)
    return f"fastest by the formulas: {words}; simulated, which decides, it is {change} against the pick"


def _memory_needed(plan: Plan) -> str:
    """Return how much more or less memory the fastest layout needs than the pick."""
    more_bytes = plan.pick.headroom_bytes - plan.fastest.headroom_bytes
    if not more_bytes:
        return "needs as much memory"
    return f"needs {format_bytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'}"
