"""Boxes of a tensor: intersection, and whether a set of boxes covers every element exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A range of elements in each dim of a tensor."""

    offsets: tuple[int, ...]
    """Index of the first element, by dim."""
    shape: tuple[int, ...]
    """Number of elements, by dim."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that holds `outer`."""
        return tuple(
            slice(start - first, start - first + size)
            for start, size, first in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


def intersection(left: Box, right: Box) -> Box | None:
    """Return the elements in both boxes; None if there are none."""
    starts = tuple(map(max, left.offsets, right.offsets))
    ends = map(min, _ends(left), _ends(right))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def coverage_problem(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Return how `boxes`, none of them empty, fail to cover each element of a tensor exactly once; None if they do."""
    whole = Box((0,) * len(shape), shape)
    for box in boxes:
        if len(box.offsets) != len(shape) or intersection(box, whole) != box:
            return f"a shard at {list(box.offsets)} of {list(box.shape)} lies outside of {list(shape)}"
    if (overlap := _overlap(list(boxes), 0, len(shape))) is not None:
        return f"elements at {list(overlap)} occur twice"
    missing = whole.numel - sum(box.numel for box in boxes)
    return f"{missing} of {whole.numel} elements are missing" if missing else None


def _overlap(boxes: list[Box], dim: int, num_dims: int) -> tuple[int, ...] | None:
    """Return the first element that two of `boxes` share, or None; they overlap in all dims before `dim`.

    Boxes of equal range in this dim are compared in the next dims; a sharded tensor is a grid, so most are equal, and
    the cost is n log n. Boxes of ranges that overlap in part are compared in pairs.
    """
    if len(boxes) < 2:
        return None
    if dim == num_dims:
        return boxes[0].offsets
    by_range: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        by_range[box.offsets[dim], box.offsets[dim] + box.shape[dim]].append(box)
    ranges = sorted(by_range)
    for equal in by_range.values():
        if (overlap := _overlap(equal, dim + 1, num_dims)) is not None:
            return overlap
    open_ranges: list[tuple[int, int]] = []
    for start, end in ranges:
        open_ranges = [other for other in open_ranges if other[1] > start]
        for other in open_ranges:
            if (shared := _shared_by_pairs(by_range[start, end], by_range[other])) is not None:
                return shared.offsets
        open_ranges.append((start, end))
    return None


def _shared_by_pairs(left: list[Box], right: list[Box]) -> Box | None:
    return next((shared for a in left for b in right if (shared := intersection(a, b)) is not None), None)


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(box.offsets, box.shape, strict=True))
