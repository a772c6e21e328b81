"""Pictures of a dry run's results: where the step goes, and which communication is exposed where; with plotly."""

from __future__ import annotations

from typing import Any

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import COMPUTE, EXPECTED, EXPOSED, HIDDEN, HOST, PHASES, REST
from meshwright.pages.figures.timeline_figures import style, time_scale
from meshwright.pages.html.page import PURPOSE
from meshwright.pages.tables.dry_run_memory import short_op
from meshwright.pages.tables.dry_run_table import most_exposed
from meshwright.pages.tables.stragglers_table import formula_words
from meshwright.spec.step.dry_run import ExposedAt, Outcome
from meshwright.spec.step.step_decomposition import COMPONENT_NAMES, COMPONENTS
from meshwright.units import format_duration

_LEAST_SHARE = 0.0005
_COLOURS = {
    "compute_s": COMPUTE["matmul"],
    "recompute_s": PHASES["recompute"],
    "bubble_s": HOST,
    "optimizer_s": PHASES["optimizer"],
    "data_s": REST,
    "host_s": REST,
}
"""By part of a step; all communication is one colour."""


def waterfall_figure(outcome: Outcome) -> Any:
    """Return the parts of the step one after another, next to what the formulas say of each."""
    go, (scale, unit) = import_extra("plotly.graph_objects", PURPOSE), time_scale(outcome.step_s)
    # Of bars in one place the last is on top.
    named = ({formula_words(outcome): outcome.expected_parts} if outcome.expected_parts else {}) | {
        "traced": outcome.parts
    }
    least_s = _LEAST_SHARE * outcome.step_s
    shown = [name for name in COMPONENTS if any(getattr(each, name) >= least_s for each in named.values())]
    rows = [COMPONENT_NAMES[name] for name in shown]
    figure = go.Figure()
    for who, parts in named.items():
        seconds = [getattr(parts, name) for name in shown]
        starts = [sum(seconds[:place]) for place in range(len(seconds))]
        colours = [_COLOURS.get(name, EXPOSED) for name in shown] if who == "traced" else EXPECTED
        figure.add_bar(
            name=who,
            orientation="h",
            y=rows,
            x=[value * scale for value in seconds],
            base=[start * scale for start in starts],
            marker={"color": colours, "line": {"width": 0}},
            text=[format_duration(value) for value in seconds],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}<br>%{{x:.4g}} {unit}<extra>{who}</extra>",
        )
    end_s = max(parts.total_s for parts in named.values())
    style(figure, rows, 46 if len(named) > 1 else 30)
    figure.update_layout(barmode="group", bargap=0.25, showlegend=len(named) > 1, margin={"l": 230})
    figure.update_layout(legend_traceorder="reversed")
    figure.update_xaxes(title=f"time, {unit}", range=[0, end_s * scale * 1.08])
    return figure


def exposed_figure(outcome: Outcome) -> Any:
    """Return the collectives that are most exposed, by place, next to what of them is hidden."""
    shown = most_exposed(outcome)
    scale, unit = time_scale(max(one.exposed_s + one.hidden_s for one in shown))
    figure, rows = import_extra("plotly.graph_objects", PURPOSE).Figure(), [place_words(one) for one in shown]
    for name, colour in (("exposed", EXPOSED), ("hidden", HIDDEN)):
        values = [getattr(one, f"{name}_s") * scale for one in shown]
        figure.add_bar(
            name=name,
            orientation="h",
            y=rows,
            x=values,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"%{{y}}<br>%{{x:.4g}} {unit} {name}<extra></extra>",
        )
    style(figure, rows, 30)
    figure.update_layout(barmode="stack", bargap=0.3, margin={"l": 380})
    figure.update_xaxes(title=f"time in a step, {unit}", rangemode="tozero")
    return figure


def place_words(one: ExposedAt) -> str:
    """Return which collective it is and where."""
    return f"{one.axis or '-'} {short_op(one.op)}, {one.phase}, {one.scope or '-'}"
