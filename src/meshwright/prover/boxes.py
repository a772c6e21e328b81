"""Record of a run on one rank, each tensor as the rank's shard; NumPy arrays, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Box:
    """One rank's shard of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the shard's first element."""
    values: Array

    def is_equal(self, other: Box) -> bool:
        """Return whether both are bitwise equal at the same offsets."""
        return self.offsets == other.offsets and self.values.tobytes() == other.values.tobytes()


Boxes = dict[str, Box]
"""One rank's shards of all tensors, by name in the unwrapped model."""


@dataclass(frozen=True)
class Record:
    """One rank's record of a run; lists are by step."""

    initial_weights: Boxes
    losses: list[float]
    grad_norms: list[float]
    gradients: list[Boxes]
    """Reduced, before clipping."""
    weights: Boxes
    """After the last step."""

    def is_equal(self, other: Record) -> bool:
        """Return whether both are bitwise equal."""
        mine, theirs = ([one.initial_weights, *one.gradients, one.weights] for one in (self, other))
        return (self.losses, self.grad_norms) == (other.losses, other.grad_norms) and all(
            a.keys() == b.keys() and all(a[name].is_equal(b[name]) for name in a)
            for a, b in zip(mine, theirs, strict=True)
        )
