"""What torch's flight recorder must give, in the version at hand, for a hang to be diagnosed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_flight_recorder import (
    RecordedCollective,
    recorded_collectives,
    recorded_groups,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _since(started_ns: int) -> list[RecordedCollective]:
    return [one for one in recorded_collectives() if one.entered_ns >= started_ns]


def test_gloo_collectives_are_recorded_in_order_with_their_group_and_end(one_rank: None) -> None:
    started_ns = time.time_ns()
    pair = dist.new_group([0], group_desc="mesh_tp")
    dist.all_reduce(torch.ones(2, 3))
    dist.all_gather([torch.ones(4)], torch.ones(4), group=pair)
    dist.all_reduce(torch.ones(()))
    ended_ns = time.time_ns()

    names = {group.description: group.name for group in recorded_groups()}
    # gloo's thread lets the caller go on just before it notes the end.
    deadline = time.monotonic() + 10
    found = _since(started_ns)
    while not all(one.is_done for one in found) and time.monotonic() < deadline:
        time.sleep(0.01)
        found = _since(started_ns)

    world, tp = names["default_pg"], names["mesh_tp"]
    assert [(one.group, one.op, one.sizes) for one in found] == [
        (world, "all_reduce", [[2, 3]]),
        (tp, "all_gather", [[4]]),
        (world, "all_reduce", [[]]),
    ]
    assert found[2].sequence == found[0].sequence + 1
    assert all(one.is_done and started_ns <= one.entered_ns <= ended_ns for one in found)
    assert [group.ranks for group in recorded_groups()] == [[0], [0]]
