"""ComparisonResult and RunComparisonResult: what `mw.compare` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.app.results.result import PlottedResult, Result
from meshwright.pages.figures.run_figures import parts_figure
from meshwright.pages.html.run_html import shown_parts
from meshwright.pages.tables.compare_table import compare_page
from meshwright.pages.tables.run_comparison_table import run_comparison_page
from meshwright.spec.run.run_comparison import RunComparison
from meshwright.spec.step.comparison import Comparison
from meshwright.units import counted, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType


class ComparisonResult(PlottedResult, Comparison):
    """Two steps with their views. Data frame: a row for each operation. Plot: parts."""

    def _summary(self) -> str:
        return f"Comparison {self.a.source.name}, {self.b.source.name}: {_steps(self.a.step_s, self.b.step_s)}"

    def _page(self) -> Iterator[RenderableType]:
        return compare_page(self)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            one.model_dump(exclude={"a", "b"})
            | {"a_s": one.a.total_s, "b_s": one.b.total_s, "a_count": one.a.count, "b_count": one.b.count}
            for one in self.operations
        ]

    def _piped_width(self) -> int:
        return 120

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        parts = {"A": self.a.parts, "B": self.b.parts}
        return {"parts": partial(parts_figure, parts, shown_parts(parts))}


class RunComparisonResult(Result, RunComparison):
    """Two runs with their views. Data frame: a row for each of them."""

    def _summary(self) -> str:
        a, b = self.a, self.b
        settings = counted(len(self.changed_settings), "setting")
        steps = _steps(a.median_step_s, b.median_step_s)
        return f"Comparison {a.name}, {b.name}: {steps}, {settings} differ, {self._losses()}"

    def _page(self) -> Iterator[RenderableType]:
        return run_comparison_page(self)

    def _rows(self) -> list[dict[str, Any]]:
        return [self.a.to_dict(), self.b.to_dict()]

    def _losses(self) -> str:
        if not self.num_common_steps:
            return "no step in common"
        return (
            "losses bitwise equal"
            if self.first_difference is None
            else f"losses differ from step {self.first_difference}"
        )


def _steps(a_s: float, b_s: float) -> str:
    change = f" ({100 * (b_s / a_s - 1):+.1f} %)" if a_s else ""
    return f"{format_duration(a_s)}/step and {format_duration(b_s)}/step{change}"
