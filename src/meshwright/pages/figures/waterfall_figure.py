"""A step as bars one after another, each from where the last one ended; with plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import COMPUTE, EXPOSED, HOST, PHASES, PREDICTED, REST
from meshwright.pages.figures.timeline_figures import LEGEND, style, time_scale
from meshwright.pages.html.html_page import PURPOSE
from meshwright.units import format_duration

LEAST_SHARE = 0.0005
"""Of the step: what takes less is not drawn."""
_COLOURS = {
    "compute_s": COMPUTE["matmul"],
    "recomputation_s": PHASES["recompute"],
    "repeated_backward_s": PHASES["recompute"],
    "pipeline_bubble_s": HOST,
    "optimizer_s": PHASES["optimizer"],
    "data_loading_s": REST,
    "cpu_bound_s": REST,
    "model_flops_at_peak_s": COMPUTE["matmul"],
    "gemm_inefficiency_s": COMPUTE["other"],
    "tile_and_wave_quantization_s": COMPUTE["other"],
    "attention_inefficiency_s": COMPUTE["attention"],
    "memory_bound_ops_s": COMPUTE["other"],
    "stragglers_s": HOST,
}
"""By part of a step; all communication is one colour."""


class StepBars(NamedTuple):
    """A step that is drawn."""

    by_part_s: Mapping[str, float]
    """Seconds of each part, in order."""
    colour: str | None = None
    """Of all bars; None for that of each part."""


def waterfall_figure(
    steps: Mapping[str, StepBars], words: Mapping[str, str], totals_s: Mapping[str, float] | None = None
) -> Any:
    """Return the parts of each step by source; `words` name the parts. Of several bars the last is on top.

    `totals_s` are whole steps, drawn below the parts from zero: the predicted one and the measured one.
    """
    totals_s = totals_s or {}
    ends_s = [sum(bars.by_part_s.values()) for bars in steps.values()]
    least_s, (scale, unit) = LEAST_SHARE * ends_s[-1], time_scale(max([ends_s[-1], *totals_s.values()]))
    shown = [name for name in words if any(bars.by_part_s.get(name, 0.0) >= least_s for bars in steps.values())]
    rows = [words[name] for name in shown]
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    for who, bars in steps.items():
        seconds = [bars.by_part_s.get(name, 0.0) for name in shown]
        figure.add_bar(
            name=who,
            orientation="h",
            y=rows,
            x=[value * scale for value in seconds],
            base=[sum(seconds[:place]) * scale for place in range(len(seconds))],
            marker={"color": bars.colour or _colours(shown), "line": {"width": 0}},
            text=[format_duration(value) for value in seconds],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}<br>%{{x:.4g}} {unit}<extra>{who}</extra>",
        )
    if totals_s:
        figure.add_bar(
            orientation="h",
            y=list(totals_s),
            x=[total_s * scale for total_s in totals_s.values()],
            marker={"color": [EXPOSED if "measured" in name else PREDICTED for name in totals_s], "line": {"width": 0}},
            text=[format_duration(total_s) for total_s in totals_s.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}<br>%{{x:.4g}} {unit}<extra></extra>",
        )
    style(figure, [*rows, *totals_s], 46 if len(steps) > 1 else 30)
    figure.update_layout(barmode="group" if len(steps) > 1 else "overlay", bargap=0.25, margin={"l": 230})
    figure.update_layout(legend_traceorder="reversed")
    if len(steps) == 1:
        figure.update_layout(
            showlegend=False, height=figure.layout.height - LEGEND, margin_b=figure.layout.margin.b - LEGEND
        )
    longest_s = max([*ends_s, *totals_s.values()])
    figure.update_xaxes(title=f"time, {unit}", range=[0, longest_s * scale * 1.08])
    return figure


def _colours(names: Sequence[str]) -> list[str]:
    return [_COLOURS.get(name, EXPOSED) for name in names]
