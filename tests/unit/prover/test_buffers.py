"""Buffers that follow a rank's own samples are found; rounding, infinities of a mask and a rank's own parts pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.prover.buffers import buffer_problem
from meshwright.prover.differences import Record, RecordedShard

REFERENCE: dict[str, Any] = {
    "mean": np.array([1.0, -2.0, 0.5, 4.0]),
    "cancelled": np.array([1e-9, 0.0, 0.0, 0.0]),
    "mask": np.array([0.0, -np.inf, np.nan, 1.0]),
    "count": np.array(3),
    "is_used": np.array([True, False]),
}


def record(**changed: Any) -> Record:
    buffers = {
        name: RecordedShard(values.shape, (0,) * values.ndim, values) for name, values in (REFERENCE | changed).items()
    }
    return Record({}, [], [], [], {}, buffers)


def test_equal_buffers_rounding_and_parts_of_a_rank_hold() -> None:
    rounded = record(mean=REFERENCE["mean"] * (1 + 1e-7), cancelled=np.array([0.0, -1e-9, 0.0, 0.0]))
    own_part = record(mean=np.ones(2), of_this_layout=np.ones(3))
    assert buffer_problem([record(), rounded, own_part], record(), 1e-5) is None


@pytest.mark.parametrize(
    ("name", "values", "how"),
    [
        ("mean", np.array([1.0, -2.0, 0.5, 4.01]), "differs by 2.2e-03 of its size"),
        ("mean", np.array([1.0, -2.0, np.nan, 4.0]), "differs by nan"),
        ("mask", np.array([0.0, 0.0, np.nan, 1.0]), "differs by inf"),
        ("count", np.array(6), "1 of 1 elements differ"),
        ("is_used", np.array([False, False]), "1 of 2 elements differ"),
    ],
)
def test_a_buffer_of_any_rank_that_differs_is_named(name: str, values: Any, how: str) -> None:
    problem = buffer_problem([record(), record(**{name: values})], record(), 1e-5)
    assert problem is not None
    assert problem.startswith(f"buffer {name} of rank 1 is not that of one process: {how}")


def test_a_shard_is_compared_with_the_elements_that_it_holds() -> None:
    shard = RecordedShard((4,), (2,), np.array([0.5, 4.0]))
    assert buffer_problem([Record({}, [], [], [], {}, {"mean": shard})], record(), 1e-5) is None
    moved = RecordedShard((4,), (1,), np.array([0.5, 4.0]))
    assert buffer_problem([Record({}, [], [], [], {}, {"mean": moved})], record(), 1e-5) is not None


def test_buffers_that_differ_are_counted() -> None:
    problem = buffer_problem([record(mean=np.zeros(4), count=np.array(4))], record(), 1e-5)
    assert problem is not None
    assert problem.endswith("; and 1 more")
