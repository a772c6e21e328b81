"""Mixture schedule: which source each position of a run reads, and how many of its samples came before.

Sources are the leaves of a binary tree. Of the first c positions of a node with children of weights a and b, the first
child has round(c a / (a + b)), so that a position is followed from the root to its source with a few integer divisions:
nothing is drawn, and no table is kept. The tree is Huffman's (1952), of the weights, so that heavy sources are near the
root.

Bound: rounding adds at most 1/2 at each node, and an error of a node passes to a child by the child's share of it.
After n positions, the count of a leaf with weight w differs from n w / W by at most (1 + sum of w / v) / 2, over the
weights v of the nodes between the leaf and the root. In Huffman's tree the sibling of a node weighs at least as much as
each of the node's children, so these v grow at least as Fibonacci's numbers (1, 2, 3, 5, ...) times w, and the bound is
below 1.7 samples for any weights. It is 1/2 for two sources and at most 1 for three; `max_error` has it for any.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from meshwright.data.order import Indices


@dataclass(frozen=True)
class _Node:
    weight: int
    source: int = -1
    """The source of a leaf."""
    first: _Node | None = None
    second: _Node | None = None


class MixtureSchedule:
    """Endless sequence of sources in proportion to whole weights, whose sum is below 2**31."""

    def __init__(self, weights: Sequence[int]) -> None:
        assert any(weights), "a mixture of nothing"
        self.num_sources = len(weights)
        self._root = _tree(weights)

    def counts(self, num_positions: int) -> list[int]:
        """Return how many of the first positions read each source."""
        found = [0] * self.num_sources

        def descend(node: _Node, count: int) -> None:
            if node.first is None or node.second is None:
                found[node.source] = count
                return
            of_first = _share(count, node.first.weight, node.weight)
            descend(node.first, of_first)
            descend(node.second, count - of_first)

        descend(self._root, num_positions)
        return found

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source of each position and its number among those of that source, shaped as `positions`."""
        sources, numbers = np.empty_like(positions), np.empty_like(positions)

        def descend(node: _Node, here: Indices, places: Indices) -> None:
            """Follow the `places` in the arrays that are number `here` of a node."""
            if node.first is None or node.second is None:
                sources.flat[places], numbers.flat[places] = node.source, here
                return
            before, after = (_share(count, node.first.weight, node.weight) for count in (here, here + 1))
            is_first = after > before
            for child, numbers_there, chosen in (
                (node.first, before, is_first),
                (node.second, here - before, ~is_first),
            ):
                if chosen.any():
                    descend(child, numbers_there[chosen], places[chosen])

        descend(self._root, positions.ravel(), np.arange(positions.size))
        return sources, numbers

    @property
    def max_error(self) -> list[float]:
        """Return for each source how far its count can be from its exact share."""
        found = [0.0] * self.num_sources

        def descend(node: _Node, above: list[int]) -> None:
            if node.first is None or node.second is None:
                found[node.source] = (1 + sum(node.weight / weight for weight in above)) / 2
                return
            within = above if node is self._root else [*above, node.weight]
            for child in (node.first, node.second):
                descend(child, within)

        if self._root.first is not None:
            descend(self._root, [])
        return found


def _tree(weights: Sequence[int]) -> _Node:
    """Return Huffman's tree of the sources that have a weight; ties go to the earlier source."""
    heap = [(weight, number, _Node(weight, number)) for number, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    for number in range(len(weights), len(weights) + len(heap) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        weight = first.weight + second.weight
        heapq.heappush(heap, (weight, number, _Node(weight, -1, first, second)))
    return heap[0][2]


_Count = TypeVar("_Count", int, Indices)


def _share(count: _Count, weight: int, total: int) -> _Count:
    """Return round(count * weight / total), half up, with products below 2**63 for any count in 64 bits."""
    whole, rest = count // total, count % total
    return whole * weight + (2 * rest * weight + total) // (2 * total)
