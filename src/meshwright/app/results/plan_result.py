"""PlanResult: what `mw.plan` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.markup import escape

from meshwright.app.results.result import PlottedResult
from meshwright.pages.figures.plan_figures import Shown, memory_ranks_figure, pareto_figure, shown_layouts, step_figure
from meshwright.pages.html.plan_html import write_plan_html
from meshwright.pages.tables.plan_table import plan_page
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.plan import Plan
from meshwright.units import GiB, format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_KEYS = (*AXES, "ep", "microbatch_size", "schedule", "activation_checkpoint", "compile")
"""Of the layout, with a column each; the others are in the column `layout`."""


class PlanResult(PlottedResult, Plan):
    """A plan with its views. Data frame: a row for each layout. Plots: pareto, memory, step."""

    note: str = Field("", exclude=True)
    """What to know of the job that was planned, such as a format that leaves tensor cores unused."""

    @property
    def layout(self) -> Layout:
        """Return the layout of the pick."""
        return self.pick.layout

    @property
    def step_s(self) -> float:
        """Return the predicted step of the pick, seconds."""
        return self.pick.estimate.step.total_s

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization of the pick; None where the device's peak is unknown."""
        return self.pick.estimate.mfu

    def to_html(self, file: Path | str, budget: Iterable[RenderableType] = ()) -> None:
        """Write the plan as one page that needs no network; `budget` are the lines and tables on time and cost."""
        write_plan_html(self, Path(file), budget)

    def _summary(self) -> str:
        return (
            f"Plan {self.model} on {self.num_devices} x {self.device}: {layout_text(self.layout.effective)}, "
            f"{step_words(self.step_s, self.mfu)}, "
            f"{memory_words(self.pick.estimate.memory.reserved_bytes, self.usable_memory_bytes)}"
        )

    def _page(self) -> Iterator[RenderableType]:
        yield from plan_page(self)
        if self.note:
            yield f"note: {escape(self.note)}"

    def _rows(self) -> list[dict[str, Any]]:
        return [_row(one) for one in shown_layouts(self)]

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        figures = {"pareto": pareto_figure, "memory": memory_ranks_figure, "step": step_figure}
        return {name: partial(figure, self) for name, figure in figures.items()}


def step_words(step_s: float, mfu: float | None) -> str:
    """Return a step time, and its MFU where that is known."""
    return f"{format_duration(step_s)}/step" + ("" if mfu is None else f", MFU {100 * mfu:.0f} %")


def memory_words(num_bytes: float, usable_bytes: float) -> str:
    """Return how much of a device is used: 51 of 80 GiB."""
    if num_bytes < GiB:
        return f"{format_bytes(num_bytes)} of {format_bytes(usable_bytes)}"
    return f"{num_bytes / GiB:.0f} of {usable_bytes / GiB:.0f} GiB"


def _row(shown: Shown) -> dict[str, Any]:
    layout, estimate = shown.candidate.layout, shown.candidate.estimate
    return {
        "role": shown.role,
        "label": shown.label,
        "layout": layout_text(layout.effective),
        **{key: getattr(layout, key) for key in _KEYS},
        "step_s": estimate.step.total_s,
        "relative_error": estimate.relative_error,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "reserved_bytes": estimate.memory.reserved_bytes,
        "free_bytes": shown.candidate.free_bytes,
        **estimate.step.to_dict(),
    }
