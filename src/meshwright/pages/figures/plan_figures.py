"""Pictures of a plan: step time against free memory, memory by pipeline rank, where the step goes; with plotly."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.extras import import_extra
from meshwright.pages.figures.colours import COMPUTE, EXPOSED, HOST, MEMORY, PHASES, ROLES
from meshwright.pages.figures.timeline_figures import INK, StepBars, style, time_scale, waterfall_figure
from meshwright.pages.html.html_page import PURPOSE
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate, Plan
from meshwright.spec.step.estimate import COMPONENT_NAMES, MEMORY_CLASSES
from meshwright.units import GiB, format_bytes, format_duration

_NAMED = ("pick", "fastest", "given", "FSDP alone")
_NUMBERED = "best of another parallel layout"
_LOOKS = {
    "pick": ("star", 17, PHASES["optimizer"]),
    "fastest": ("star-open", 14, PHASES["optimizer"]),
    "given": ("diamond", 12, ROLES["temporary"]),
    "FSDP alone": ("square", 11, EXPOSED),
    "leaves more memory": ("circle", 9, COMPUTE["matmul"]),
    _NUMBERED: ("circle-open", 10, ROLES["activation"]),
    "best with another key": ("circle", 6, HOST),
}
"""Symbol, size and colour by role, the order of the legend."""
_MARGIN = 0.08
"""Of the ranges of both axes, around what they must hold."""
_LABEL_WIDTH, _LABEL_HEIGHT = 0.03, 0.03
"""Of the ranges of the axes, what a label covers."""
_FAR, _FEW_FAR = 1.5, 2
"""Times the pick's step beyond which one or two layouts are drawn on the axis' end, and do not squeeze the others."""
_FEW_RANKS = 8


class Shown(NamedTuple):
    """A layout of a plan, and why it is listed."""

    role: str
    label: str
    """Its number among the best of each parallel layout, or the keys in which it differs from the pick; or empty."""
    candidate: Candidate


def shown_layouts(plan: Plan) -> list[Shown]:
    """Return the layouts that a plan compares, each once, the pick first."""
    listed = [Shown("pick", "", plan.pick)]
    listed += [Shown("fastest", "", plan.fastest)]
    listed += [Shown("given", "", plan.given)] if plan.given is not None else []
    listed += [Shown("FSDP alone", "", plan.fsdp_alone)] if plan.fsdp_alone is not None else []
    listed += [Shown("leaves more memory", "", one) for one in plan.pareto_front]
    listed += [Shown(_NUMBERED, f"{place}", one) for place, one in enumerate(plan.runners_up, start=2)]
    listed += [Shown("best with another key", one.change, one.other) for one in plan.alternatives]
    first: dict[str, Shown] = {}
    for one in listed:
        first.setdefault(layout_text(one.candidate.layout), one)
    return list(first.values())


def pareto_figure(plan: Plan) -> Any:
    """Return step time against free memory; a layout beyond the axes lies on their end, with its figures in its label.

    The axes hold all but FSDP alone, a layout that was given and the best with another key, which may be far off.
    """
    shown = shown_layouts(plan)
    axes = _axes(plan, *time_scale(max(one.candidate.estimate.step.total_s for one in shown)))
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    fastest_first = sorted(plan.pareto_front, key=lambda one: one.estimate.step.total_s)
    most = accumulate((one.free_bytes for one in fastest_first), max)
    # The pick is listed in any case; one that a faster layout with more free memory dominates is not on the line.
    front = [one for one, bytes_ in zip(fastest_first, most, strict=True) if one.free_bytes == bytes_]
    x, y = zip(*(axes.place(one) for one in front), strict=True)
    line = {"color": COMPUTE["matmul"], "width": 1.5, "shape": "vh"}
    figure.add_scatter(x=x, y=y, mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for role in reversed(_LOOKS):
        if own := [one for one in shown if one.role == role]:
            figure.add_trace(_points(role, own, plan, axes))
    _mark_memory(figure, plan, axes.memory_ends[0])
    style(figure, [], 0)
    figure.update_layout(height=480, legend_traceorder="reversed", margin={"l": 70})
    figure.update_xaxes(title="free memory of the fullest rank, GiB", range=axes.memory_ends)
    figure.update_yaxes(title=f"step time, {axes.unit}", range=axes.step_ends)
    return figure


def memory_ranks_figure(plan: Plan) -> Any:
    """Return the pick's memory by tensor class, a bar for each pipeline rank."""
    ranks = plan.memory_by_pipeline_rank
    rows = [f"pp rank {rank}" for rank in range(len(ranks))] if len(ranks) > 1 else ["every rank"]
    figure = import_extra("plotly.graph_objects", PURPOSE).Figure()
    for name, colour in MEMORY.items():
        if any(getattr(rank, name) for rank in ranks):
            values = [getattr(rank, name) for rank in ranks]
            figure.add_bar(
                name=MEMORY_CLASSES[name],
                orientation="h",
                y=rows,
                x=[value / GiB for value in values],
                marker={"color": colour, "line": {"width": 0}},
                text=[format_bytes(value) for value in values],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertemplate="%{y}<br>%{x:.2f} GiB<extra>%{fullData.name}</extra>",
            )
    usable = plan.usable_memory_bytes / GiB
    style(figure, rows, 34 if len(rows) <= _FEW_RANKS else 20)
    figure.update_layout(barmode="stack", bargap=0.25, uniformtext={"mode": "hide", "minsize": 10})
    figure.update_layout(legend_traceorder="normal")
    figure.add_vline(x=usable, line={"color": EXPOSED, "width": 1.5})
    longest = max(usable, *(rank.reserved_bytes / GiB for rank in ranks))
    figure.update_xaxes(title="memory, GiB; the line is the device's usable memory", range=[0, 1.03 * longest])
    return figure


def step_figure(plan: Plan) -> Any:
    """Return the terms of the pick's step one after another."""
    return waterfall_figure({"predicted": StepBars(plan.pick.estimate.step.to_dict())}, COMPONENT_NAMES)


class _Axes(NamedTuple):
    """What the axes of the Pareto figure show."""

    scale: float
    """What seconds are multiplied by."""
    unit: str
    memory_ends: tuple[float, float]
    """GiB."""
    step_ends: tuple[float, float]
    """In `unit`."""

    def place(self, one: Candidate) -> tuple[float, float]:
        """Return where a layout is, beyond the ends or not."""
        return one.free_bytes / GiB, one.estimate.step.total_s * self.scale

    def is_near(self, one: tuple[float, float], other: tuple[float, float]) -> bool:
        """Return whether labels of two places would overlap."""
        ends = (self.memory_ends, self.step_ends)
        distances = [abs(a - b) / (high - low) for a, b, (low, high) in zip(one, other, ends, strict=True)]
        return distances[0] < _LABEL_WIDTH and distances[1] < _LABEL_HEIGHT

    def inside(self, x: float, y: float) -> tuple[float, float]:
        """Return the place between the ends that is nearest."""
        return _between(x, self.memory_ends), _between(y, self.step_ends)


def _axes(plan: Plan, scale: float, unit: str) -> _Axes:
    """Return axes that hold the pick, the frontier and the best layout of each parallelism, but for a few far ones."""
    held = [plan.pick, *plan.pareto_front, *plan.runners_up]
    memory = [0.0, *(one.free_bytes / GiB for one in held)]
    steps_s = [one.estimate.step.total_s for one in held]
    near_s = [step_s for step_s in steps_s if step_s < _FAR * plan.pick.estimate.step.total_s]
    if len(steps_s) - len(near_s) <= _FEW_FAR:
        steps_s = near_s
    # What was given and what is plain is in, unless that would squeeze the rest.
    for one in (plan.given, plan.fsdp_alone):
        if one is not None:
            memory += [one.free_bytes / GiB] if -one.free_bytes < plan.usable_memory_bytes / 4 else []
            steps_s += [one.estimate.step.total_s] if one.estimate.step.total_s < 1.5 * max(steps_s) else []
    return _Axes(scale, unit, _widened(memory), _widened([step_s * scale for step_s in steps_s]))


def _widened(values: Sequence[float]) -> tuple[float, float]:
    margin = _MARGIN * (max(values) - min(values) or abs(max(values)))
    return min(values) - margin, max(values) + margin


def _between(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


def _points(role: str, own: Sequence[Shown], plan: Plan, axes: _Axes) -> Any:
    symbol, size, colour = _LOOKS[role]
    places = [axes.place(one.candidate) for one in own]
    drawn = [axes.inside(*place) for place in places]
    is_far = [place != inside for place, inside in zip(places, drawn, strict=True)]
    figures = [f" ({_figures(one, plan)})" if far else "" for one, far in zip(own, is_far, strict=True)]
    return import_extra("plotly.graph_objects", PURPOSE).Scatter(
        name=role,
        x=[x for x, _ in drawn],
        y=[y for _, y in drawn],
        mode="markers+text",
        marker={"symbol": symbol, "size": size, "color": colour, "line": {"width": 1.5, "color": colour}},
        text=[label + words for label, words in zip(_labels(role, own, drawn, axes), figures, strict=True)],
        textposition=[_side(role, x, axes.memory_ends) for x, _ in drawn],
        textfont={"color": colour if role in _NAMED else INK},
        cliponaxis=False,
        hovertext=[_hover(one, plan) for one in own],
        hoverinfo="text",
    )


def _labels(role: str, own: Sequence[Shown], drawn: Sequence[tuple[float, float]], axes: _Axes) -> list[str]:
    """Return the text next to each point: names of the few, numbers of those that a table lists by number.

    Of numbered points whose labels would overlap the first has the numbers of all.
    """
    if role != _NUMBERED:
        return [role if role in _NAMED else ""] * len(own)
    clusters: dict[int, list[str]] = {}
    for place, one in enumerate(own):
        first = next((other for other in clusters if axes.is_near(drawn[other], drawn[place])), place)
        clusters.setdefault(first, []).append(one.label)
    return [", ".join(clusters.get(place, [])) for place in range(len(own))]


def _side(role: str, x: float, ends: Sequence[float]) -> str:
    if role == "pick":
        return "bottom center"
    if role == "fastest":
        return "middle left"  # it has less free memory than the pick, and may be close to it
    if role == _NUMBERED:
        return "top center"
    return "middle left" if x > (ends[0] + ends[1]) / 2 else "middle right"


def _figures(one: Shown, plan: Plan) -> str:
    step_s, free = one.candidate.estimate.step.total_s, one.candidate.free_bytes
    headroom = one.candidate.headroom_bytes
    change = step_s / plan.pick.estimate.step.total_s - 1
    memory = f"{format_bytes(abs(free))} {'free' if free >= 0 else 'missing'}"
    if headroom < 0 <= free:
        memory = f"{format_bytes(-headroom)} of the host's memory missing"
    return f"{format_duration(step_s)}, {100 * change:+.1f} %, {memory}"


def _hover(one: Shown, plan: Plan) -> str:
    keys = layout_text(one.candidate.layout.effective).replace(",", "<br>")
    label = f" {one.label}" if one.label else ""
    return f"<b>{one.role}{label}</b><br>{_figures(one, plan)}<br>{keys}"


def _mark_memory(figure: Any, plan: Plan, least: float) -> None:
    """Shade what does not fit, and what planner.memory_margin keeps free."""
    margin = plan.memory_margin * plan.usable_memory_bytes / GiB
    for start, end, colour in ((least, 0.0, EXPOSED), (0.0, margin, HOST)):
        if end > start:
            figure.add_vrect(x0=start, x1=end, fillcolor=colour, opacity=0.12, line_width=0, layer="below")
