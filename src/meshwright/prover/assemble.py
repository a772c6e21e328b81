"""Records of the ranks, each tensor as a shard, assembled to whole tensors; detects unequal replicas. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def is_equal(self, other: Record) -> bool:
        """Return whether both are bitwise equal."""
        mine, theirs = ([one.initial_weights, *one.gradients, one.weights] for one in (self, other))
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
