"""smallest(): the fewest of some faults that still make a run fail."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def smallest(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a subset of `items`, which fail, that fails and of which no single item can be left out.

    Halves, then quarters, ... are left out first (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing
    input", 2002, its complements): few calls of `fails` where few items are to blame.
    """
    left, num_parts = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // num_parts)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if rest and fails(rest):
                left, num_parts = rest, max(2, num_parts - 1)
                break
        else:
            if size == 1:
                break
            num_parts = min(len(left), 2 * num_parts)
    return left
