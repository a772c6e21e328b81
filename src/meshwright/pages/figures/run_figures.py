"""Pictures of training runs and simulations: curves, the step by component, exposed communication; with plotly."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import COMPUTE, EXPOSED, HIDDEN, PHASES, PREDICTED
from meshwright.pages.figures.timeline_figures import INK, StepBars, style, time_scale, waterfall_figure
from meshwright.pages.html.html_page import PURPOSE
from meshwright.pages.tables.simulation_memory import short_op
from meshwright.pages.tables.simulation_table import most_exposed
from meshwright.pages.tables.stragglers_table import predicted_words
from meshwright.spec.run.run_report import RunMetrics
from meshwright.spec.step.estimate import COMPONENT_NAMES, StepDecomposition
from meshwright.spec.step.simulation_report import ExposedAt, Outcome
from meshwright.spec.step.step_waterfall import MEASURED, Waterfall
from meshwright.units import GiB, format_duration

_HEIGHT = 250
_LINE = COMPUTE["matmul"]
_COMPARED = (_LINE, EXPOSED)
MEDIAN = "measured, median"
"""What the median step of a run is called next to its predicted and simulated ones."""
_WHO = {"predicted": PREDICTED, "simulated": PHASES["forward"], "measured": EXPOSED, MEDIAN: "#7B241C"}


def has_curve(metrics: RunMetrics, column: str) -> bool:
    """Return whether the run has such figures: data without tokens have no tokens per second."""
    return not np.isnan(getattr(metrics, column)).all()


def curve_figure(metrics: RunMetrics, column: str, predicted: float | None = None) -> Any:
    """Return a metric over steps, `predicted` as a dashed line; None where the run has no such figures."""
    if not has_curve(metrics, column):
        return None
    values = getattr(metrics, column) / (GiB if column == "memory_bytes" else 1)
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    figure.add_scatter(x=metrics.step, y=values, name=column, line={"color": _LINE, "width": 2})
    if column == "loss" and len(metrics.validation_step):
        marks = {"color": EXPOSED, "size": 8}
        figure.add_scatter(
            x=metrics.validation_step, y=metrics.validation_loss, name="validation", mode="markers", marker=marks
        )
    if predicted is not None:
        figure.add_hline(y=predicted, line_dash="dash", line_color=INK, annotation_text="predicted")
    for step in metrics.step[1:][np.diff(metrics.attempt) > 0]:
        figure.add_vline(x=int(step), line_dash="dot", line_color=INK, annotation_text="resumed")
    _style(figure, _HEIGHT)
    figure.update_xaxes(title="step")
    return figure


def compared_curve_figure(runs: Mapping[str, RunMetrics], column: str) -> Any:
    """Return a metric of several runs, by name, over steps."""
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    for (name, metrics), colour in zip(runs.items(), _COMPARED, strict=False):
        values = getattr(metrics, column) / (GiB if column == "memory_bytes" else 1)
        figure.add_scatter(x=metrics.step, y=values, name=name, line={"color": colour, "width": 2})
    _style(figure, _HEIGHT)
    figure.update_xaxes(title="step")
    return figure


def parts_figure(parts: Mapping[str, StepDecomposition], shown: Sequence[str], measured_s: float | None = None) -> Any:
    """Return the components and the total of a step side by side, as each of `parts` has them.

    `measured_s`, the median step of a run, is drawn next to the totals.
    """
    scale, unit = time_scale(max(measured_s or 0.0, *(one.total_s for one in parts.values())))
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    bars = {
        who: {COMPONENT_NAMES[name]: getattr(one, name) for name in shown} | {"step": one.total_s}
        for who, one in parts.items()
    }
    bars |= {} if measured_s is None else {MEDIAN: {"step": measured_s}}
    for who, seconds in bars.items():
        figure.add_bar(
            name=who,
            x=list(seconds),
            y=[value * scale for value in seconds.values()],
            text=[format_duration(value) for value in seconds.values()],
            marker={"color": _WHO.get(who, _LINE), "line": {"width": 0}},
        )
    _style(figure, 340)
    figure.update_layout(barmode="group", legend={"orientation": "h", "y": -0.14, "yanchor": "top"})
    figure.update_yaxes(title=f"time in a step, {unit}")
    return figure


def measured_waterfall_figure(found: Waterfall) -> Any:
    """Return the step from its floor up, as predicted and, where it was profiled, as measured; with the totals below.

    Causes that only one of them distinguishes have one bar.
    """
    steps = {who: step for who, step in found.columns.items() if who != MEASURED or found.source == "profile"}
    # The last one, on top, has the colour of each cause.
    last = list(steps)[-1]
    bars = {
        who: StepBars({row.name: row.by_column_s[who] or 0.0 for row in found.rows}, None if who == last else PREDICTED)
        for who in steps
    }
    totals_s = {f"step, {who}": one.total_s for who, one in steps.items() if who != MEASURED}
    totals_s[f"step, {MEDIAN}"] = found.measured_s
    return waterfall_figure(bars, {row.name: row.words for row in found.rows}, totals_s)


def _style(figure: Any, height: int) -> None:
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 20, "t": 36, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK},
    )
    for axes in (figure.update_xaxes, figure.update_yaxes):
        axes(gridcolor="rgba(128,136,148,0.25)", zeroline=False)


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
