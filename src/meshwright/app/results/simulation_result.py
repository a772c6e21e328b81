"""Simulation and its timeline: what `mw.simulate` returns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from meshwright.app.results.result import PlottedResult, Rows, memory_words, step_words
from meshwright.pages.figures.run_figures import exposed_figure, outcome_figure
from meshwright.pages.figures.timeline_figures import memory_figure, pipeline_figure, streams_figure
from meshwright.pages.html.simulation_html import write_html
from meshwright.pages.tables.run_table import parts_table
from meshwright.pages.tables.simulation_table import most_exposed, simulation_page
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.step.simulation_report import SimulationReport
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import SpanKind, Timeline
from meshwright.spec.trace.traces import Traces
from meshwright.units import counted, format_duration

_TEXTS = {"name": "names", "scope": "scopes", "phase": "phases", "action": "actions", "axis": "axes"}
"""Columns of spans that are positions in a tuple of the timeline."""


class TimelineResult(PlottedResult, Timeline):
    """A timeline with its views. Data frame: a row for each span. Plots: ranks, streams, memory."""

    def _summary(self) -> str:
        shown, num_ranks = len(self.ranks), sum(self.multiplicity)
        classes = f", {shown} of them shown" if shown != num_ranks else ""
        return (
            f"Timeline {self.source.name}, {self.source.kind}: {counted(num_ranks, 'rank')}{classes}, "
            f"{format_duration(self.step_s)}/step, {len(self.spans):,} spans"
        )

    def _page(self) -> Iterator[RenderableType]:
        yield Text(self._summary())
        yield parts_table({self.source.kind: decompose(self)})

    def _rows(self) -> Rows:
        columns = dict(vars(self.spans))
        columns["kind"] = np.array([kind.name.lower() for kind in SpanKind])[self.spans.kind]
        for name, texts in _TEXTS.items():
            # -1, which means none, is the last element.
            columns[name] = np.array([*getattr(self, texts), ""], dtype=object)[columns[name]]
        return columns

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        timelines = {"ranks": lambda: pipeline_figure(self)[0], "streams": lambda: streams_figure(self)[0]}
        return timelines | ({"memory": lambda: memory_figure(self, np.inf)} if self.memory else {})


@dataclass(frozen=True, repr=False)
class Simulation(PlottedResult):
    """What the step would do, and what that follows from.

    Data frame: a row for each class of ranks. Plots: step, ranks, streams, memory, exposed.
    """

    run: SimulationReport
    timeline: TimelineResult | None
    """None where the step would not end."""
    traces: Traces

    @property
    def step_s(self) -> float | None:
        """Return the simulated step, seconds; None where it would not end."""
        return None if self.run.outcome is None else self.run.outcome.step_s

    @property
    def fits(self) -> bool:
        """Return whether the step ends, and every rank's memory suffices."""
        return not self.run.problems and not self.run.misfits

    def to_json(self) -> str:
        """Return what `meshwright simulate --json` prints."""
        return self.run.to_json()

    def to_html(self, file: Path | str) -> None:
        """Write the simulation as one page that needs no network."""
        write_html(self.run, self.timeline, Path(file))

    def _summary(self) -> str:
        run, layout = self.run, "" if self.run.layout is None else f"{layout_text(self.run.layout.effective)}, "
        about = f"Simulation {run.model} on {run.num_devices} x {run.device}: {layout}"
        if run.outcome is None:
            return f"{about}deadlocks or fails: {counted(len(run.problems), 'problem')}"
        held_bytes = 0 if run.outcome.fullest is None else run.outcome.fullest.reserved_bytes
        memory = memory_words(held_bytes, run.usable_memory_bytes)
        misfit = ", out of memory" if run.misfits else ""
        return f"{about}{step_words(run.outcome.step_s, run.outcome.mfu)}, {memory}{misfit}"

    def _page(self) -> Iterator[RenderableType]:
        return simulation_page(self.run)

    def _rows(self) -> list[dict[str, Any]]:
        if self.run.outcome is None:
            return []
        memory = {one.rank: one for one in self.run.outcome.memory}
        return [
            {
                "rank": one.rank,
                "num_ranks": one.num_ranks,
                "pipeline_rank": one.pipeline_rank,
                "allocated_bytes": memory[one.rank].allocated_bytes if one.rank in memory else None,
                "reserved_bytes": memory[one.rank].reserved_bytes if one.rank in memory else None,
                **one.parts.to_dict(),
            }
            for one in self.run.outcome.ranks
        ]

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        outcome, timeline = self.run.outcome, self.timeline
        if outcome is None or timeline is None:
            return {}
        figures: dict[str, Callable[[], Any]] = {"step": partial(outcome_figure, outcome), **timeline._figures()}
        if timeline.memory:
            figures["memory"] = partial(memory_figure, timeline, self.run.usable_memory_bytes)
        return figures | ({"exposed": partial(exposed_figure, outcome)} if most_exposed(outcome) else {})
