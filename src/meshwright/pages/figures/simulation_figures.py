"""Figures of a simulation: where the step goes, and which communication is exposed where; with plotly."""

from __future__ import annotations

from typing import Any

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import EXPOSED, HIDDEN, PREDICTED
from meshwright.pages.figures.timeline_figures import StepBars, style, time_scale, waterfall_figure
from meshwright.pages.html.html_page import PURPOSE
from meshwright.pages.tables.simulation_memory import short_op
from meshwright.pages.tables.simulation_table import most_exposed
from meshwright.pages.tables.stragglers_table import predicted_words
from meshwright.spec.step.estimate import COMPONENT_NAMES
from meshwright.spec.step.simulation_report import ExposedAt, Outcome


def outcome_figure(outcome: Outcome) -> Any:
    """Return the parts of the step one after another, next to what the formulas say of each."""
    predicted = outcome.predicted_parts
    by_formula = {predicted_words(outcome): StepBars(predicted.to_dict(), PREDICTED)} if predicted is not None else {}
    return waterfall_figure(by_formula | {"simulated": StepBars(outcome.parts.to_dict())}, COMPONENT_NAMES)


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
