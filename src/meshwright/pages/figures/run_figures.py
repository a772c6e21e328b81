"""Pictures of training runs: a curve of each metric, and the step by component; with plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import COMPUTE, EXPECTED, EXPOSED, PHASES
from meshwright.pages.figures.timeline_figures import INK, time_scale
from meshwright.pages.html.html_page import PURPOSE
from meshwright.spec.run.run_report import RunMetrics
from meshwright.spec.step.step_decomposition import COMPONENT_NAMES, StepDecomposition
from meshwright.units import GiB, format_duration

_HEIGHT = 250
_LINE = COMPUTE["matmul"]
_WHO = {"expected": EXPECTED, "simulated": PHASES["forward"], "profiled": EXPOSED}


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


def parts_figure(parts: Mapping[str, StepDecomposition], shown: Sequence[str]) -> Any:
    """Return the components of a step side by side, as each of `parts` has them."""
    scale, unit = time_scale(max(one.total_s for one in parts.values()))
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    for who, one in parts.items():
        seconds = [getattr(one, name) for name in shown]
        figure.add_bar(
            name=who,
            x=[COMPONENT_NAMES[name] for name in shown],
            y=[value * scale for value in seconds],
            text=[format_duration(value) for value in seconds],
            marker={"color": _WHO.get(who, _LINE), "line": {"width": 0}},
        )
    _style(figure, 320)
    figure.update_layout(barmode="group", showlegend=len(parts) > 1)
    figure.update_yaxes(title=f"time in a step, {unit}")
    return figure


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
