"""What ranks of a collective exchange, from its arguments; what cannot be one collective is refused."""

from __future__ import annotations

import pytest
import torch

from meshwright.tracer.record.collective_bytes import Exchange, agreed_of, exchange_of


def rows(count: int) -> torch.Tensor:
    """Return a tensor of rows of 8 bytes."""
    return torch.empty(count, 2)


def test_splits_are_bytes_to_and_from_each_rank() -> None:
    given = {"output": rows(3), "input": rows(4), "output_split_sizes": [1, 2], "input_split_sizes": [3, 1]}
    assert exchange_of("alltoall_base_", given, 2, 0) == Exchange((24, 8), (8, 16))


@pytest.mark.parametrize("splits", [[], [2, 2]])
def test_even_splits_are_left_out(splits: list[int]) -> None:
    given = {"output": rows(4), "input": rows(4), "output_split_sizes": splits, "input_split_sizes": []}
    assert exchange_of("alltoall_base_", given, 2, 0) == Exchange()


def test_a_functional_all_to_all_has_no_output_yet() -> None:
    given = {"input": rows(4), "output_split_sizes": [1, 2], "input_split_sizes": [3, 1]}
    assert exchange_of("all_to_all_single", given, 2, 0) == Exchange((24, 8), (8, 16))


def test_lists_of_tensors_are_exchanged_one_by_one() -> None:
    given = {"output_tensors": [[rows(1), rows(3)]], "input_tensors": [rows(1)]}
    assert exchange_of("allgather_", given, 2, 0) == Exchange((8, 8), (8, 24))
    given = {"output_tensors": [rows(1), rows(3)], "input_tensors": [rows(2), rows(1)]}
    assert exchange_of("alltoall_", given, 2, 0) == Exchange((16, 8), (8, 24))


def test_only_the_root_has_what_is_scattered_and_gathered() -> None:
    given = {"output_tensors": [[]], "input_tensors": [rows(1)], "root_rank": 1}
    assert exchange_of("gather_", given, 2, 0) == Exchange((0, 8), (0, 0))
    given = {"output_tensors": [rows(1)], "input_tensors": [[rows(1), rows(2)]], "root_rank": 0}
    assert exchange_of("scatter_", given, 2, 0) == Exchange((8, 16), (8, 0))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "alltoall_base_",
            {"output": rows(4), "input": rows(4), "output_split_sizes": [4, 1], "input_split_sizes": []},
            r"output_split_sizes = \[4, 1\] must be 2 numbers",
        ),
        (
            "alltoall_base_",
            {"output": rows(4), "input": rows(3), "output_split_sizes": [], "input_split_sizes": []},
            "input of 3 rows must be a multiple of the group's 2 ranks",
        ),
        ("_allgather_base_", {"output_tensor": rows(3), "input_tensor": rows(2)}, "6 elements and must"),
        ("_reduce_scatter_base_", {"output_tensor": rows(2), "input_tensor": rows(3)}, "6 elements and must"),
    ],
)
def test_tensors_that_are_of_no_one_collective_are_refused(name: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_of(name, given, 2, 0)


def test_what_all_ranks_pass_alike_is_said() -> None:
    assert agreed_of({"reduce_op": object()}, "max") == "max"
    assert agreed_of({"reduce_op": "AVG", "src": 2}, "") == "avg, root 2 of the group"
    assert agreed_of({"root_rank": 0}, "") == "root 0 of the group"
    assert agreed_of({}, "") == ""
