"""Comparison: two steps side by side, by component and by operation; simulated or measured, in any order."""

import re
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import SpanKind, Timeline, TimelineSource

_KINDS: dict[int, Literal["compute", "communication", "waiting"]] = {
    SpanKind.COMPUTE: "compute",
    SpanKind.COMMUNICATION: "communication",
    SpanKind.WAIT: "waiting",
}
_BLOCK = re.compile(r"^(.*?)\.?\d+(\..*)?$")
_MARKED = re.compile(r".*\((.*)\)$")
Key = tuple[str, str, str, str]


class Use(Frozen):
    """What one rank, on average, spends on an operation in a step."""

    total_s: NonNegativeFloat = 0.0
    """From its beginning to its end, whatever overlaps with it."""
    count: NonNegativeFloat = 0.0
    """How often it runs."""


class Operation(Frozen):
    """An operation, a collective or a wait for one, in both steps."""

    kind: Literal["compute", "communication", "waiting"]
    """Communication counts from when all participants have arrived; waiting is what a stream or the host does."""
    name: str
    """As torch calls it, without overload."""
    scope: str
    """The list of modules in whose code it is, such as blocks.*; "" outside of modules."""
    axis: str
    """Of communication and waits."""
    a: Use
    b: Use

    @property
    def difference_s(self) -> float:
        """Return the seconds that B takes more than A."""
        return self.b.total_s - self.a.total_s


class RankComparison(Frozen):
    """One rank in both steps."""

    rank: NonNegativeInt
    a: StepDecomposition
    b: StepDecomposition


class Side(Frozen):
    """One of the two steps."""

    source: TimelineSource
    step_s: NonNegativeFloat
    num_ranks: PositiveInt
    """Ranks that the timeline has spans of."""
    parts: StepDecomposition
    """The mean over all ranks."""


class Comparison(Frozen):
    """Two steps."""

    a: Side
    b: Side
    operations: Annotated[tuple[Operation, ...], Field(strict=False)]
    """Those that differ most in seconds first."""
    ranks: Annotated[tuple[RankComparison, ...], Field(strict=False)]
    """The ranks that both have."""

    @property
    def miscounted(self) -> tuple[Operation, ...]:
        """Return what runs more often in one step than in the other, over all modules, waits left out."""
        totals: dict[Key, tuple[Use, Use]] = {}
        for one in self.operations:
            key = one.kind, one.name, "", one.axis
            a, b = totals.get(key, (Use(), Use()))
            totals[key] = _sum(a, one.a), _sum(b, one.b)
        every = (_operation(key, a, b) for key, (a, b) in totals.items() if key[0] != "waiting")
        differing = [one for one in every if round(one.a.count, 3) != round(one.b.count, 3)]
        return tuple(sorted(differing, key=lambda one: -abs(one.difference_s)))


def compare(a: Timeline, b: Timeline) -> Comparison:
    """Return step `a` next to step `b`."""
    uses_a, uses_b = _uses(a), _uses(b)
    operations = [
        _operation(key, uses_a.get(key, Use()), uses_b.get(key, Use())) for key in dict.fromkeys((*uses_a, *uses_b))
    ]
    return Comparison(
        a=_side(a),
        b=_side(b),
        operations=tuple(sorted(operations, key=lambda one: -abs(one.difference_s))),
        ranks=tuple(
            RankComparison(rank=rank, a=decompose(a, rank), b=decompose(b, rank))
            for rank in a.ranks
            if rank in b.ranks and len(a.ranks) > 1
        ),
    )


def _side(timeline: Timeline) -> Side:
    num_ranks, parts = sum(timeline.multiplicity), decompose(timeline)
    return Side(source=timeline.source, step_s=timeline.step_s, num_ranks=num_ranks, parts=parts)


def _uses(timeline: Timeline) -> dict[Key, Use]:
    """Return what a rank spends on each operation, on average over the ranks."""
    spans = timeline.spans
    is_compared = np.isin(spans.kind, list(_KINDS))
    columns = np.stack([spans.kind, spans.name, spans.scope, spans.axis], axis=1)[is_compared]
    weights = np.array(timeline.multiplicity, float) / sum(timeline.multiplicity)
    weight = weights[np.searchsorted(np.array(timeline.ranks), spans.rank[is_compared])]
    rows, which = np.unique(columns, axis=0, return_inverse=True)
    seconds = np.bincount(which.ravel(), weight * (spans.end_s - spans.start_s)[is_compared], len(rows))
    counts = np.bincount(which.ravel(), weight, len(rows))
    found: dict[Key, Use] = {}
    for (kind, name, scope, axis), seconds_here, count in zip(rows, seconds, counts, strict=True):
        key = (
            _KINDS[int(kind)],
            short_name(_text(timeline.names, name)),
            module_list(_text(timeline.scopes, scope)),
            _text(timeline.axes, axis),
        )
        more = Use(total_s=max(float(seconds_here), 0.0), count=float(count))
        found[key] = _sum(found.get(key, Use()), more)
    return found


def short_name(name: str) -> str:
    """Return an operation's name without its overload: aten.mm for aten.mm.default."""
    return ".".join(name.split(".")[:2])


def module_list(scope: str) -> str:
    """Return blocks.* for blocks.3.attention, and "" outside of lists of modules: a profile holds no more."""
    marked = _MARKED.match(scope)
    found = _BLOCK.match(marked[1] if marked else scope)
    return f"{found[1]}.*" if found else ""


def _text(texts: tuple[str, ...], position: int) -> str:
    return "" if position < 0 else texts[position]


def _sum(one: Use, other: Use) -> Use:
    return Use(total_s=one.total_s + other.total_s, count=one.count + other.count)


def _operation(key: Key, a: Use, b: Use) -> Operation:
    kind, name, scope, axis = key
    return Operation.from_dict({"kind": kind, "name": name, "scope": scope, "axis": axis, "a": a, "b": b})
