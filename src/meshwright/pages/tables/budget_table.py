"""Tables of time and money: one run with its failures, and the frontier over sizes of clusters."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, percent
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Budget
from meshwright.units import format_duration

_LEAST_GOODPUT = 1e-4
"""Below it failures leave a run next to no step that lasts: figures of its end have dozens of digits."""


def budget_page(
    budget: Budget, tokens: str, deadline_days: float | None, points: Sequence[Budget] = ()
) -> Iterator[RenderableType]:
    """Yield what one run takes; `tokens` are as the user wrote them, `points` the frontier, where it was asked for."""
    yield _whole_run(budget, tokens)
    if budget.mtbf_s is not None and budget.checkpoint_interval_s is not None:
        yield (
            f"goodput {percent(budget.goodput)}: one failure in {format_duration(budget.mtbf_s)}, "
            f"a checkpoint ({format_duration(budget.checkpoint_s)}) every "
            f"{format_duration(budget.checkpoint_interval_s)}"
        )
    if deadline_days is not None:
        missed = f"[red]{deadline_days:g}d are not enough[/]: {_more_devices(points)}"
        yield f"{deadline_days:g}d are enough" if budget.is_deadline_satisfied else missed


def _whole_run(budget: Budget, tokens: str) -> str:
    if not _ends(budget):
        return (
            f"[red]{tokens} tokens: no end in sight[/]: devices fail sooner than a run restarts and makes a checkpoint"
        )
    low, high = (budget.days * factor for factor in (max(0.0, 1 - budget.relative_error), 1 + budget.relative_error))
    cost = "" if budget.cost is None else f", cost [bold]{money(budget.cost)}[/]"
    return (
        f"[bold]{tokens} tokens: {budget.days:.1f} days[/] ({low:.1f} to {high:.1f}), "
        f"{budget.num_steps:,} steps, {budget.device_hours:,.0f} device hours{cost}"
    )


def _ends(budget: Budget) -> bool:
    return budget.goodput >= _LEAST_GOODPUT


def _more_devices(points: Sequence[Budget]) -> str:
    if not points:
        return "see --frontier for more devices"
    enough = [point for point in points if point.is_deadline_satisfied]
    if not enough:
        return "nor are they on any cluster below"
    least = min(enough, key=lambda point: point.num_devices)
    return f"they are on {least.num_devices} devices of {least.cluster} (below)"


def frontier_page(points: Sequence[Budget]) -> Iterator[RenderableType]:
    """Yield sizes of clusters with days and cost, and then their layouts; dominated points are dim."""
    yield _frontier_table(points)
    yield ""
    layouts = PageTable("cluster", "devices#", "best layout there")
    for point in points:
        layouts.add_row(point.cluster, f"{point.num_devices}", escape(layout_text(point.layout).replace(",", ", ")))
    yield layouts


def _frontier_table(points: Sequence[Budget]) -> Table:
    has_cost = any(point.cost is not None for point in points)
    costs = ("cost#",) if has_cost else ()
    table = PageTable("cluster", "devices#", "days#", "device hours#", *costs, "goodput#", "step#")
    for point in points:
        table.add_row(
            point.cluster,
            str(point.num_devices),
            (f"{point.days:.1f}" if _ends(point) else "no end")
            + {None: "", True: "", False: " late"}[point.is_deadline_satisfied],
            f"{point.device_hours:,.0f}" if _ends(point) else "-",
            *([money(point.cost or 0.0) if _ends(point) else "-"] if has_cost else []),
            percent(point.goodput),
            format_duration(point.step_s),
            style="dim" if is_dominated(point, points) else None,
        )
    return table


def is_dominated(point: Budget, points: Sequence[Budget]) -> bool:
    """Return whether another point is both faster and cheaper (in device hours, without prices)."""

    def price(one: Budget) -> float:
        return one.device_hours if one.cost is None else one.cost

    return any(other.days < point.days and price(other) < price(point) for other in points)


def money(amount: float) -> str:
    """Return an amount in the currency of its price, to three significant digits, with no space to break a line at."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{amount / size:.3g}{suffix}"
    return f"{amount:.3g}"
