"""Records of the ranks assembled to whole tensors, and the largest differences between a layout and one process.

A parameter's gradient is compared as a whole, by its 2-norm relative to that of one process. Where that norm is tiny
(gradients that cancel), rounding dominates; the least norm that counts is a thousandth of the typical parameter's, that
of all gradients over the root of the number of parameters. Weights are compared by their updates, like gradients: in
the weights themselves a wrong update would vanish. Rounding of the weights in each step is allowed for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.run.proof import Difference, DifferenceKind, ProofPrecision

LEAST_SHARE = 1e-3
"""Of the norm of a typical tensor: a difference is relative to no less."""


class _Quantity(NamedTuple):
    """Compared quantity: fields of a Difference."""

    kind: DifferenceKind
    name: str
    step: int


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that rounding explains."""

    loss: float
    gradient: float
    weight: float


TOLERANCES: Mapping[ProofPrecision, Tolerances] = {
    "float32": Tolerances(loss=2e-6, gradient=1e-5, weight=1e-5),
    "float64": Tolerances(loss=1e-11, gradient=1e-11, weight=1e-11),
    # bfloat16 rounds by 2**-9 = 0.2 % in each layer, and a token between two experts may go to the other: up to 8 % of
    # a gradient in a mixture, 1 % in a dense model (2026-11-22). Planted faults are an order of magnitude above.
    "mixed": Tolerances(loss=2e-3, gradient=0.2, weight=0.2),
}


def compare(
    record: WholeRecord, reference: WholeRecord, tolerances: Tolerances
) -> tuple[Difference, Difference, Difference]:
    """Return the worst difference of losses, of gradients and of weights; raises Incomparable for other names."""
    steps = range(1, len(reference.losses) + 1)
    losses = [
        _difference(_Quantity("loss", "", step), abs(loss - one), abs(one), tolerances.loss)
        for step, loss, one in zip(steps, record.losses, reference.losses, strict=True)
    ]
    gradients = [
        difference
        for step, tensors, ones in zip(steps, record.gradients, reference.gradients, strict=True)
        for difference in _gradients(tensors, ones, step, tolerances.gradient)
    ]
    norms = [
        _difference(_Quantity("gradient", "all", step), abs(norm - one), one, tolerances.gradient)
        for step, norm, one in zip(steps, record.grad_norms, reference.grad_norms, strict=True)
    ]
    weights = _weights(record, reference, tolerances.weight)
    return _max(losses), _max([*gradients, *norms]), _max(weights)


def _weights(record: WholeRecord, reference: WholeRecord, bar: float) -> list[Difference]:
    """Return the error of each parameter's update relative to its size."""
    start, end = record.initial_weights, record.weights
    _require_same_names(start, reference.initial_weights)
    _require_same_names(end, reference.weights)
    # Initial weights are bitwise equal under all layouts.
    unlike = [name for name, weight in reference.initial_weights.items() if not np.array_equal(start[name], weight)]
    if unlike:
        raise Incomparable(f"initial weight {unlike[0]} is not that of one process{_more(unlike)}")
    num_steps = len(record.losses)
    ways = {name: weight - reference.initial_weights[name] for name, weight in reference.weights.items()}
    least = _least(ways)
    differences = []
    for name, weight in reference.weights.items():
        rounding = num_steps * float(np.finfo(weight.dtype).eps) * _norm(weight)
        size = max(_norm(ways[name]), least, rounding / bar)
        differences.append(_difference(_Quantity("weight", name, num_steps), _norm(end[name] - weight), size, bar))
    return differences


def _gradients(tensors: Tensors, references: Tensors, step: int, bar: float) -> list[Difference]:
    _require_same_names(tensors, references)
    least = _least(references)
    return [
        _difference(
            _Quantity("gradient", name, step), _norm(tensors[name] - reference), max(_norm(reference), least), bar
        )
        for name, reference in references.items()
    ]


def _least(references: Tensors) -> float:
    return LEAST_SHARE * math.sqrt(sum(_norm(one) ** 2 for one in references.values()) / len(references))


def _difference(what: _Quantity, distance: float, size: float, bar: float) -> Difference:
    relative = 0.0
    if distance:
        # Infinite relative to zeros, but JSON has no infinity.
        relative = min(distance / size if size else math.inf, sys.float_info.max)
    return Difference(kind=what.kind, name=what.name, step=what.step, relative=relative, bar=bar)


def _require_same_names(tensors: Tensors, references: Tensors) -> None:
    missing = [name for name in references if name not in tensors]
    if missing:
        raise Incomparable(f"no rank holds {missing[0]}{_more(missing)}")
    unknown = [name for name in tensors if name not in references]
    if unknown:
        raise Incomparable(f"one process has no {unknown[0]}{_more(unknown)}")
    for name, reference in references.items():
        if tensors[name].shape != reference.shape:
            raise Incomparable(f"{name} is {tensors[name].shape}, and {reference.shape} in one process")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _norm(tensor: Array) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))


def _max(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda difference: difference.share)


Array = NDArray[Any]


@dataclass(frozen=True)
class RecordedShard:
    """One rank's shard of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the shard's first element."""
    values: Array

    def is_equal(self, other: RecordedShard) -> bool:
        """Return whether both are bitwise equal at the same offsets."""
        return self.offsets == other.offsets and self.values.tobytes() == other.values.tobytes()


RecordedShards = dict[str, RecordedShard]
"""One rank's shards of all tensors, by name in the unwrapped model."""


@dataclass(frozen=True)
class Record:
    """One rank's record of a run; lists are by step."""

    initial_weights: RecordedShards
    losses: list[float]
    grad_norms: list[float]
    gradients: list[RecordedShards]
    """Reduced, before clipping."""
    weights: RecordedShards
    """After the last step."""
    buffers: RecordedShards = field(default_factory=dict)
    """Persistent ones after the last step."""

    def is_equal(self, other: Record) -> bool:
        """Return whether both are bitwise equal."""
        mine, theirs = ([one.initial_weights, *one.gradients, one.weights, one.buffers] for one in (self, other))
        return (self.losses, self.grad_norms) == (other.losses, other.grad_norms) and all(
            a.keys() == b.keys() and all(a[name].is_equal(b[name]) for name in a)
            for a, b in zip(mine, theirs, strict=True)
        )


Tensors = dict[str, Array]
"""Whole tensors by name in the unwrapped model."""


@dataclass(frozen=True)
class WholeRecord:
    """A run as one process would record it; unequal replicas are taken from the first rank."""

    initial_weights: Tensors
    losses: list[float]
    grad_norms: list[float]
    gradients: list[Tensors]
    weights: Tensors
    unequal_copies: list[str]
    """Values of replicas that should be bitwise equal and differ, in the order of the run."""


class Incomparable(Exception):
    """Tensors of a run are missing, or have other shapes than those of one process."""


def assemble(records: Sequence[Record]) -> WholeRecord:
    """Return the whole run of the ranks' `records`; raises Incomparable for parts that no rank holds."""
    unequal: list[str] = []
    first = records[0]
    for rank, other in enumerate(records):
        if (other.losses, other.grad_norms) != (first.losses, first.grad_norms):
            unequal.append(f"losses or gradient norms of rank 0 and rank {rank}")
    initial_weights = _whole("initial", [one.initial_weights for one in records], unequal)
    gradients = [
        _whole(f"gradient of step {step}:", boxes, unequal)
        for step, boxes in enumerate(zip(*(one.gradients for one in records), strict=True), start=1)
    ]
    weights = _whole("updated", [one.weights for one in records], unequal)
    return WholeRecord(initial_weights, first.losses, first.grad_norms, gradients, weights, unequal)


def _whole(what: str, boxes_of_ranks: Sequence[RecordedShards], unequal: list[str]) -> Tensors:
    parts: dict[str, list[tuple[int, RecordedShard]]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for name, box in boxes.items():
            parts.setdefault(name, []).append((rank, box))
    return {name: _tensor(f"{what} {name}", boxes, unequal) for name, boxes in parts.items()}


def _tensor(what: str, parts: Sequence[tuple[int, RecordedShard]], unequal: list[str]) -> Array:
    """Return one whole tensor, each element from the first rank that holds it."""
    _, first = parts[0]
    whole = np.empty(first.shape, first.values.dtype)
    # Rank of each element; -1 is none.
    source = np.full(first.shape, -1, np.int32)
    for rank, box in parts:
        at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.values.shape, strict=True))
        is_new = source[at] < 0
        differs = ~is_new & (whole[at] != box.values)
        if differs.any():
            unequal.append(f"{what} of rank {source[at][differs][0]} and rank {rank}")
        whole[at] = np.where(is_new, box.values, whole[at])
        source[at] = np.where(is_new, rank, source[at])
    if (source < 0).any():
        raise Incomparable(f"{what}: no rank holds {int((source < 0).sum())} of its {source.size} elements")
    return whole
