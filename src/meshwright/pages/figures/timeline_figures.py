"""Pictures of a step: the pipeline over all ranks, one rank's streams and memory, its parts as bars; with plotly."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import ACTIONS, AXES, COMPUTE, EXPOSED, HOST, PHASES, PREDICTED, REST, ROLES, WAIT
from meshwright.pages.figures.intervals import Interval, action_intervals, stream_intervals, thinned
from meshwright.pages.html.html_page import PURPOSE
from meshwright.pages.tables.simulation_memory import role_words
from meshwright.spec.layout.schedule.action import parse_action
from meshwright.spec.trace.timeline import NO_AXIS, MemoryCurve, TensorRole, Timeline
from meshwright.units import GiB, MiB, format_duration

_MOST_ACTIONS, _MOST_INTERVALS, _MOST_MOMENTS = 20_000, 16_000, 500
"""What is shown of all ranks, of the streams of all of them, and of one rank's memory."""
_MOST_OF_RANK = 4_000
INK, _GRID = "#7A828E", "rgba(128,136,148,0.25)"
"""Lines and text of a figure: legible on a light page and on a dark one."""
_TOP, _AXIS, LEGEND = 40, 52, 44
"""Margins of a figure in pixels: above it, and below it for the axis and for two rows of the legend."""
_BOTTOM = _AXIS + LEGEND
_STREAM_KEYS = {**COMPUTE, **{name: PHASES[name] for name in ("recompute", "optimizer")}, **AXES}
_STREAM_KEYS |= {NO_AXIS: REST, "waiting": WAIT, "host": HOST, "data": REST}


def pipeline_figure(timeline: Timeline) -> tuple[Any, float]:
    """Return who computes what when, a row a rank, and what is too short to be shown, seconds."""
    most = _MOST_ACTIONS // len(timeline.ranks)
    drawn = [action_intervals(timeline, rank, most) for rank in timeline.ranks]
    by_name: dict[str, tuple[str, list[Interval]]] = {}
    for one in (interval for each in drawn for interval in each.intervals):
        name, colour = _action_look(one.key, timeline.actions)
        by_name.setdefault(name, (colour, []))[1].append(one)
    go, scale = import_extra("plotly.graph_objects", PURPOSE), time_scale(timeline.step_s)
    figure = go.Figure([_bars(name, colour, own, scale) for name, (colour, own) in by_name.items()])
    style(figure, [f"rank {rank}" for rank in timeline.ranks], 26)
    _span_step(figure, timeline)
    return figure, max(each.cut_s for each in drawn)


def streams_figure(timeline: Timeline) -> tuple[Any, float]:
    """Return what each stream of a rank, chosen in a menu, does when, and what is too short to be shown, seconds."""
    go, scale = import_extra("plotly.graph_objects", PURPOSE), time_scale(timeline.step_s)
    figure, owners, rows, cut_s = go.Figure(), [], dict[str, None](), 0.0
    most = min(_MOST_OF_RANK, _MOST_INTERVALS // len(timeline.ranks))
    for rank in timeline.ranks:
        drawn = stream_intervals(timeline, rank, most)
        cut_s = max(cut_s, drawn.cut_s)
        rows |= dict.fromkeys(one.row for one in drawn.intervals)
        for name, colour in _STREAM_KEYS.items():
            if own := [one for one in drawn.intervals if one.key == name]:
                figure.add_trace(_bars(name, colour, own, scale, is_shown=rank == timeline.ranks[0]))
                owners.append(rank)
    style(figure, list(rows), 34)
    _span_step(figure, timeline)
    _add_menu(figure, timeline.ranks, owners)
    return figure, cut_s


def memory_figure(timeline: Timeline, usable_bytes: float) -> Any:
    """Return the memory of a rank, chosen in a menu, over the step by tensor class."""
    go, (scale, _) = import_extra("plotly.graph_objects", PURPOSE), time_scale(timeline.step_s)
    peak = max((int(curve.reserved_bytes.max()) for curve in timeline.memory), default=0)
    size, size_unit = (GiB, "GiB") if peak >= GiB else (MiB, "MiB")
    figure, owners = go.Figure(), []
    for curve in timeline.memory:
        for trace in _memory_traces(curve, scale, size, is_shown=curve is timeline.memory[0]):
            figure.add_trace(trace)
            owners.append(curve.rank)
    if peak > usable_bytes / 3:
        figure.add_hline(
            y=usable_bytes / size,
            line={"color": "#C0392B", "width": 1.5},
            annotation={"text": "usable memory of the device", "font": {"color": "#C0392B"}},
        )
    style(figure, [], 0)
    _span_step(figure, timeline)
    figure.update_layout(
        height=420, hovermode="x unified", yaxis={"title": f"memory, {size_unit}", "rangemode": "tozero"}
    )
    _add_menu(figure, [curve.rank for curve in timeline.memory], owners)
    return figure


def _memory_traces(curve: MemoryCurve, scale: float, size: float, *, is_shown: bool) -> list[Any]:
    go = import_extra("plotly.graph_objects", PURPOSE)
    rows = thinned(curve, _MOST_MOMENTS)
    at = (curve.at_s[rows] * scale).astype(np.float32)
    common: dict[str, Any] = {"x": at, "mode": "lines", "visible": is_shown, "hovertemplate": "%{y:.3f}"}
    common["line"] = {"shape": "hv", "width": 0.5}
    traces = [
        go.Scatter(
            y=(curve.by_role[rows, role] / size).astype(np.float32),
            name=role_words(role.name.lower()),
            stackgroup="roles",
            fillcolor=ROLES[role.name.lower()],
            **common | {"line": {"shape": "hv", "width": 0.5, "color": ROLES[role.name.lower()]}},
        )
        for role in TensorRole
        if curve.by_role[:, role].any()
    ]
    for name, values, dash in (("allocated", curve.allocated_bytes, "dot"), ("reserved", curve.reserved_bytes, "dash")):
        line = {"shape": "hv", "width": 1.5, "color": INK, "dash": dash}
        traces.append(go.Scatter(y=(values[rows] / size).astype(np.float32), name=name, **common | {"line": line}))
    return traces


def _bars(name: str, colour: str, own: Sequence[Interval], scale: tuple[float, str], *, is_shown: bool = True) -> Any:
    go = import_extra("plotly.graph_objects", PURPOSE)
    factor, unit = scale
    start_s, end_s = (np.array([getattr(one, side) for one in own]) for side in ("start_s", "end_s"))
    return go.Bar(
        name=name,
        orientation="h",
        y=[one.row for one in own],
        base=(start_s * factor).astype(np.float32),
        x=((end_s - start_s) * factor).astype(np.float32),
        marker={"color": colour, "line": {"width": 0}},
        text=[one.text for one in own],
        textposition="none",
        hovertemplate=f"%{{text}}<br>%{{x:.4g}} {unit}, from %{{base:.5g}} {unit}<extra>{name}</extra>",
        visible=is_shown,
    )


def style(figure: Any, rows: Sequence[str], row_height: int) -> None:
    """Give a figure the page's looks, and one row for each of `rows`, the first on top; the legend is below it."""
    figure.update_layout(
        barmode="overlay",
        bargap=0.18,
        height=_TOP + _BOTTOM + row_height * max(len(rows), 2),
        margin={"l": 80, "r": 20, "t": _TOP, "b": _BOTTOM},
        # Above are the menu of ranks, on the left, and the toolbar, on the right.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK},
        # The page shows through, light or dark.
        plot_bgcolor="rgba(0,0,0,0)",
        paper_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, showline=True, linecolor=INK)
    if rows:
        figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(rows)), fixedrange=True)
    figure.update_yaxes(gridcolor=_GRID, linecolor=INK)


def _span_step(figure: Any, timeline: Timeline) -> None:
    scale, unit = time_scale(timeline.step_s)
    figure.update_xaxes(title=f"time, {unit}", range=[0, timeline.step_s * scale])


def _add_menu(figure: Any, ranks: Sequence[int], owners: Sequence[int]) -> None:
    """Add a menu that shows the traces of one rank only; `owners` are those of the traces, in order."""
    if len(ranks) < 2:
        return
    buttons = [
        {"label": f"rank {rank}", "method": "restyle", "args": ["visible", [owner == rank for owner in owners]]}
        for rank in ranks
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"r": 6}}
    menu |= {"bgcolor": "rgba(128,136,148,0.15)", "bordercolor": INK, "font": {"color": INK}}
    figure.update_layout(updatemenus=[menu])


def _action_look(key: str, actions: Sequence[str]) -> tuple[str, str]:
    """Return the name in the legend, and the colour, of an action or a phase."""
    if key in actions:
        return ACTIONS[parse_action(key).kind]
    return key, PHASES.get(key, REST)


def time_scale(longest_s: float) -> tuple[float, str]:
    """Return what seconds are multiplied by to be shown, and the unit."""
    if longest_s < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if longest_s < 10 else (1.0, "s")


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
            marker={"color": bars.colour or [_COLOURS.get(name, EXPOSED) for name in shown], "line": {"width": 0}},
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
