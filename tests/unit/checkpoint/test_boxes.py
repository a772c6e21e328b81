"""Boxes that cover a tensor exactly once, and those that do not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint.format.boxes import Box, coverage_problem, intersection


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it, by cuts at random places of random boxes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(1, box.shape[dim]))
        for start, length in ((0, size), (size, box.shape[dim] - size)):
            offsets, sizes = list(box.offsets), list(box.shape)
            offsets[dim], sizes[dim] = offsets[dim] + start, length
            if length:
                boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, boxes


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    covered = np.zeros(shape, dtype=int)
    whole = Box((0,) * len(shape), shape)
    for box in boxes:
        covered[box.within(whole)] += 1
    return covered


@given(tilings(), st.data())
def test_a_tiling_is_accepted_and_every_change_of_it_refused(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    assert coverage_problem(boxes, shape) is None
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert "missing" in str(coverage_problem(boxes[:at] + boxes[at + 1 :], shape))
    assert "occur twice" in str(coverage_problem([*boxes, boxes[at]], shape))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), max_size=6))
def test_it_agrees_with_counting_elements(corners: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, c), (min(b, 4 - a), min(d, 4 - c))) for a, b, c, d in corners]
    boxes = [box for box in boxes if box.numel]
    assert (coverage_problem(boxes, (4, 4)) is None) == bool((counts((4, 4), boxes) == 1).all())


def test_a_box_outside_of_the_tensor_is_refused() -> None:
    assert "outside" in str(coverage_problem([Box((2,), (3,))], (4,)))
    assert "outside" in str(coverage_problem([Box((0, 0), (2, 2))], (4,)))


def test_a_scalar_is_covered_by_one_box() -> None:
    assert coverage_problem([Box((), ())], ()) is None
    assert coverage_problem([], ()) == "1 of 1 elements are missing"
    assert "twice" in str(coverage_problem([Box((), ())] * 2, ()))


def test_an_intersection_without_elements_is_none() -> None:
    assert intersection(Box((0,), (2,)), Box((2,), (2,))) is None
    assert intersection(Box((0, 1), (3, 3)), Box((2, 0), (4, 2))) == Box((2, 1), (1, 1))
