"""Record: a run as one rank saw it, each tensor as the part that the rank holds; plain arrays, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Box:
    """The part of a tensor that one rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the part's first element."""
    values: Array

    def is_equal(self, other: Box) -> bool:
        """Return whether both are the same bits at the same place."""
        return self.offsets == other.offsets and self.values.tobytes() == other.values.tobytes()


Boxes = dict[str, Box]
"""One rank's parts of all tensors, by name in the plain model."""


@dataclass(frozen=True)
class Record:
    """One rank's view of a run; lists count steps from the first."""

    initial_weights: Boxes
    losses: list[float]
    grad_norms: list[float]
    gradients: list[Boxes]
    """Complete, but not yet clipped."""
    weights: Boxes
    """After the last step."""

    def is_equal(self, other: Record) -> bool:
        """Return whether both are the same, bit by bit."""
        mine, theirs = ([one.initial_weights, *one.gradients, one.weights] for one in (self, other))
        return (self.losses, self.grad_norms) == (other.losses, other.grad_norms) and all(
            a.keys() == b.keys() and all(a[name].is_equal(b[name]) for name in a)
            for a, b in zip(mine, theirs, strict=True)
        )
