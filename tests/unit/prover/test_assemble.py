"""What ranks hold becomes whole tensors again, and copies that differ, or parts that nobody holds, are told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.prover.differences import Incomparable, Record, RecordedShard, RecordedShards, assemble

WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)


def box(rows: slice, columns: slice = slice(0, 4), shift: float = 0.0) -> RecordedShard:
    return RecordedShard((6, 4), (rows.start, columns.start), WHOLE[rows, columns] + np.float32(shift))


def of(boxes: RecordedShards, loss: float = 1.0) -> Record:
    return Record(boxes, [loss], [2.0], [boxes], boxes)


@given(st.integers(0, 6), st.integers(0, 4))
def test_boxes_become_the_tensor_that_they_are_parts_of(row: int, column: int) -> None:
    parts = [
        box(slice(start, end), slice(left, right))
        for start, end in ((0, row), (row, 6))
        for left, right in ((0, column), (column, 4))
    ]
    whole = assemble([of({"weight": part}) for part in parts])
    assert whole.unequal_copies == []
    for tensors in (whole.initial_weights, whole.gradients[0], whole.weights):
        np.testing.assert_array_equal(tensors["weight"], WHOLE)


def test_ranks_may_hold_different_parameters() -> None:
    whole = assemble([of({"first": box(slice(0, 6))}), of({"last": box(slice(0, 6))})])
    assert list(whole.weights) == ["first", "last"]


def test_copies_that_differ_in_one_element_are_told_with_their_ranks() -> None:
    other = box(slice(3, 6))
    other.values[0, 0] += 1e-3
    whole = assemble([of({"weight": one}) for one in (box(slice(0, 3)), box(slice(3, 6)), other)])
    assert whole.unequal_copies == [
        "initial weight of rank 1 and rank 2",
        "gradient of step 1: weight of rank 1 and rank 2",
        "updated weight of rank 1 and rank 2",
    ]
    np.testing.assert_array_equal(whole.weights["weight"], WHOLE)


def test_ranks_that_tell_another_loss_are_told() -> None:
    boxes = {"weight": box(slice(0, 6))}
    assert assemble([of(boxes), of(boxes, loss=1.1)]).unequal_copies == [
        "losses or gradient norms of rank 0 and rank 1"
    ]


def test_a_part_that_no_rank_holds_makes_runs_incomparable() -> None:
    with pytest.raises(Incomparable, match="initial weight: no rank holds 4 of its 24 elements"):
        assemble([of({"weight": box(slice(0, 2))}), of({"weight": box(slice(3, 6))})])


def test_records_are_equal_only_to_the_bit() -> None:
    boxes = {"weight": box(slice(0, 6))}
    assert of(boxes).is_equal(of({"weight": box(slice(0, 6))}))
    assert not of(boxes).is_equal(of({"weight": box(slice(0, 6), shift=1e-6)}))
    assert not of(boxes).is_equal(of({"other": box(slice(0, 6))}))
    assert not of(boxes).is_equal(of(boxes, loss=1.0 + 1e-15))
