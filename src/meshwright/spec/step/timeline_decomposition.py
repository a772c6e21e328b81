"""decompose: a timeline's StepDecomposition, a partition of the ranks' wall time; simulated and measured alike."""

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.model.op import OP_KINDS, op_kind
from meshwright.spec.step.estimate import COMPONENTS, StepDecomposition
from meshwright.spec.trace.timeline import DDP_MARK, FSDP_MARK, Floats, Ints, SpanKind, Timeline

Mask = NDArray[np.bool_]

_COMPONENT_OF_AXIS = {
    "tp": "tp_communication_s",
    # Ranks that share a key head.
    "tp_heads": "tp_communication_s",
    "etp": "tp_communication_s",
    "cp": "cp_communication_s",
    "ep": "ep_communication_s",
    "dp": "dp_communication_s",
    "fsdp": "dp_communication_s",
    "expert_dp_shard": "dp_communication_s",
    # Of layout.separate_reduce_group.
    "fsdp_reduce": "dp_communication_s",
    "expert_dp_shard_reduce": "dp_communication_s",
    "dp_shard": "dp_communication_s",
    "dp_replicate": "dp_communication_s",
    # Ranks among which Muon distributes matrices that two axes cut.
    "fsdp_tp": "dp_communication_s",
    "expert_dp_shard_etp": "dp_communication_s",
    "pp": "pipeline_p2p_s",
}
"""The component that communication along a mesh axis belongs to; other_communication_s for any other axis."""

_MESSAGES = ("c10d.send", "c10d.recv")
_COMPONENT_OF_PHASE = {"recompute": "recomputation_s", "optimizer": "optimizer_s"}
_COMPUTE = ("compute_s", "recomputation_s", "optimizer_s")
_COMMUNICATION = tuple(dict.fromkeys((*_COMPONENT_OF_AXIS.values(), "other_communication_s")))


def decompose(timeline: Timeline, rank: int | None = None) -> StepDecomposition:
    """Return one rank's step by component, or the mean over all ranks, each weighted by its multiplicity.

    Each moment of [0, step_s] belongs to the first of these that holds:

    1. The default stream (0) computes: recompute, optimizer or compute by phase, and compute what FSDP2 does. Or it is
       busy with the host's work or with data, as the thread of a CPU is that prepares and computes by turns: host,
       data.
    2. The default stream or the host waits for communication: that of its axis. Along pp it is a bubble while no
       message of this rank is under way, since then its neighbour has not sent yet. So is any other wait in a program
       whose ranks send each other messages, while nothing that it is for is under way: other stages are still at work.
    3. Communication is under way on any stream: that of its axis.
    4. Another stream computes: by phase, as in 1.
    5. The host reads data.
    6. Nothing of these: the device waits for the host.
    """
    shares = seconds_by_rank(timeline)
    if rank is not None:
        return _decomposition(shares[timeline.ranks.index(rank)])
    weights = np.array(timeline.multiplicity, float)
    return _decomposition(weights @ shares / weights.sum())


def seconds_by_rank(timeline: Timeline) -> Floats:
    """Return the seconds of each rank in each component [ranks, COMPONENTS]; every row sums to the step."""
    if timeline not in _seconds:
        # Tables of one timeline ask for them several times, and a step of millions of spans takes seconds to sweep.
        _seconds[timeline] = np.ascontiguousarray(_swept(timeline)[:, : len(COMPONENTS)])
    return _seconds[timeline]


_seconds: WeakKeyDictionary[Timeline, Floats] = WeakKeyDictionary()


def seconds_and_waits(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return the seconds of each rank in each component [ranks, COMPONENTS] without those in which it waits for a
    collective that has not started, since another rank has not arrived; and these [ranks].

    A wait for a stage of a pipeline is a bubble, as in `seconds_by_rank`.
    """
    swept = _swept(timeline, splits_waits=True)
    return swept[:, :-1], swept[:, -1]


def _swept(timeline: Timeline, *, splits_waits: bool = False) -> Floats:
    """Return the seconds of each rank in each component and, last, where they are split off, in waits for other ranks
    [ranks, COMPONENTS + 1].
    """
    spans, num_ranks, step_s = timeline.spans, len(timeline.ranks), timeline.step_s
    # Rank after rank on one line of time, so that all are swept at once.
    offset = np.searchsorted(np.array(timeline.ranks), spans.rank) * step_s
    start, end = (np.clip(at_s, 0.0, step_s) + offset for at_s in (spans.start_s, spans.end_s))
    edges = np.unique(np.concatenate([start, end, np.arange(num_ranks + 1) * step_s]))
    width = np.diff(edges)
    bounds = np.searchsorted(edges, start), np.searchsorted(edges, end)
    component = np.full(len(width), COMPONENTS.index("cpu_bound_s"))
    is_open = np.ones(len(width), bool)
    for name, mask, wait in _claims(timeline):
        if mask.any():
            taken = is_open & _is_covered(bounds, len(width), mask)
            component[taken] = COMPONENTS.index(name)
            if wait is not None and (wait.is_bubble or splits_waits):
                column = COMPONENTS.index("pipeline_bubble_s") if wait.is_bubble else len(COMPONENTS)
                component[taken & ~_is_covered(bounds, len(width), wait.under_way)] = column
            is_open &= ~taken
    at = np.clip(np.searchsorted(np.arange(num_ranks + 1) * step_s, edges[:-1], side="right") - 1, 0, num_ranks - 1)
    num_columns = len(COMPONENTS) + 1
    seconds = np.bincount(at * num_columns + component, weights=width, minlength=num_ranks * num_columns)
    return seconds.astype(np.float64, copy=False).reshape(num_ranks, num_columns)


class _Wait(NamedTuple):
    """What a wait is for."""

    under_way: Mask
    """The spans in which that is under way; without them other ranks have not arrived."""
    is_bubble: bool
    """Whether these are stages of a pipeline."""


def _claims(timeline: Timeline) -> Iterator[tuple[str, Mask, _Wait | None]]:
    """Yield (component, the spans that claim it, what they wait for), the first claim first."""
    spans = timeline.spans
    is_default = spans.stream == 0
    by_phase = components_of_compute(timeline)
    by_axis = _components_of_communication(timeline)
    computes, communicates = spans.kind == SpanKind.COMPUTE, spans.kind == SpanKind.COMMUNICATION
    for name in _COMPUTE:
        yield name, is_default & computes & (by_phase == COMPONENTS.index(name)), None
    yield "data_loading_s", is_default & (spans.kind == SpanKind.DATA), None
    yield "cpu_bound_s", is_default & (spans.kind == SpanKind.HOST), None
    waits = (spans.kind == SpanKind.WAIT) & (spans.stream <= 0) & (spans.axis >= 0)
    may_be_bubbles = ("pipeline_p2p_s", "other_communication_s") if _has_stages(timeline) else ()
    for name in _COMMUNICATION:
        is_along = by_axis == COMPONENTS.index(name)
        yield name, waits & is_along, _Wait(communicates & is_along, name in may_be_bubbles)
    for name in _COMMUNICATION:
        yield name, communicates & (by_axis == COMPONENTS.index(name)), None
    for name in _COMPUTE:
        yield name, computes & (by_phase == COMPONENTS.index(name)), None
    yield "data_loading_s", spans.kind == SpanKind.DATA, None


def _has_stages(timeline: Timeline) -> bool:
    """Return whether ranks wait for each other's messages: in a pipeline, also one that a program writes by hand."""
    return "pp" in timeline.axes or any(name.startswith(_MESSAGES) for name in timeline.names)


def components_of_compute(timeline: Timeline) -> Ints:
    """Return for each span the position in COMPONENTS of what it belongs to if it computes [spans]."""
    by_phase = _positions(timeline.phases, _COMPONENT_OF_PHASE, "compute_s", timeline.spans.phase)
    return np.where(_is_data_parallel(timeline), COMPONENTS.index("compute_s"), by_phase)


def _components_of_communication(timeline: Timeline) -> Ints:
    """Return for each span the position in COMPONENTS of what it belongs to if it communicates [spans].

    That of FSDP2 and DDP is data-parallel whatever a program calls the dims of its mesh.
    """
    by_axis = _positions(timeline.axes, _COMPONENT_OF_AXIS, "other_communication_s", timeline.spans.axis)
    is_unknown = by_axis == COMPONENTS.index("other_communication_s")
    return np.where(is_unknown & _is_data_parallel(timeline), COMPONENTS.index("dp_communication_s"), by_axis)


def compute_seconds(timeline: Timeline, rank: int | None = None) -> dict[str, float]:
    """Return the seconds of StepDecomposition.compute_s by kind of operation, of one rank or the mean over all ranks.

    Work of other streams while the default stream is idle, such as copies, counts as "other".
    """
    spans = timeline.spans
    is_counted = components_of_compute(timeline) == COMPONENTS.index("compute_s")
    weights = np.array(timeline.multiplicity, float) if rank is None else np.array(timeline.ranks) == rank
    share = (weights / weights.sum())[np.searchsorted(timeline.ranks, spans.rank)]
    rows = np.flatnonzero((spans.kind == SpanKind.COMPUTE) & (spans.stream == 0) & is_counted)
    kinds = np.array([OP_KINDS.index(op_kind(name)) for name in timeline.names] + [OP_KINDS.index("other")])
    took_s = share[rows] * (spans.end_s[rows] - spans.start_s[rows])
    seconds = np.bincount(kinds[spans.name[rows]], took_s, minlength=len(OP_KINDS))
    found: dict[str, float] = dict(zip(OP_KINDS, seconds.tolist(), strict=True))
    whole_s = decompose(timeline, rank).compute_s
    return found | {"other": found["other"] + max(whole_s - sum(found.values()), 0.0)}


def _is_data_parallel(timeline: Timeline) -> Mask:
    is_marked = np.array([scope.startswith((FSDP_MARK, DDP_MARK)) for scope in timeline.scopes] + [False])
    of_spans: Mask = is_marked[timeline.spans.scope]
    return of_spans


def _positions(texts: tuple[str, ...], components: dict[str, str], default: str, column: Ints) -> Ints:
    """Return for each span the position in COMPONENTS of what its text in `texts` belongs to."""
    # "tp (symmetric memory)" is tp, too.
    table = np.array([COMPONENTS.index(components.get(text.partition(" (")[0], default)) for text in (*texts, "")])
    return table[column]


def _is_covered(bounds: tuple[Ints, Ints], num_intervals: int, mask: Mask) -> Mask:
    """Return for each interval whether one of the spans in `mask` covers it; `bounds` are all spans' first intervals,
    and those after their last ones.
    """
    change = np.bincount(bounds[0][mask], minlength=num_intervals + 1)
    change -= np.bincount(bounds[1][mask], minlength=num_intervals + 1)
    covered: Mask = np.cumsum(change)[:-1] > 0
    return covered


def _decomposition(components_s: Floats) -> StepDecomposition:
    return StepDecomposition(
        **{name: float(max(value, 0.0)) for name, value in zip(COMPONENTS, components_s, strict=True)}
    )
