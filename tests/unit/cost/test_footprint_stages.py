"""Blocks of pipeline ranks, and microbatches in flight: the closed forms against the orders played action by action."""

import itertools

import numpy as np
import pytest

from meshwright.cost.footprint_stages import chunks_in_flight, first_blocks, stages_of_rank
from meshwright.cost.layout_table import layout_table
from meshwright.spec.layout import SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.schedule import build_schedule, peak_in_flight
from meshwright.spec.schedule_rules import schedule_problems

DEGREES = (1, 2, 3, 4, 8)
NUM_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def _layouts(schedule: str) -> list[Layout]:
    numbers = (1,) if schedule in SINGLE_STAGE_SCHEDULES else (2,) if schedule in V_SCHEDULES else (1, 2, 3)
    return [
        Layout(pp=pp, schedule=schedule, virtual_stages=number) for pp, number in itertools.product(DEGREES, numbers)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_in_flight_are_those_of_the_order(schedule: str) -> None:
    num_compared = 0
    for layout, number in itertools.product(_layouts(schedule), NUM_MICROBATCHES):
        if layout.pp == 1 or schedule_problems(layout, number):
            continue
        order = build_schedule(layout, number)
        table, ranks = layout_table([layout] * layout.pp), np.arange(layout.pp)
        chunks = chunks_in_flight(table, np.full(layout.pp, float(number)), ranks)
        assert chunks.tolist() == list(peak_in_flight(order)), f"{layout.schedule} {layout.pp} x {number}"
        num_compared += 1
    assert num_compared >= 10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_hold_the_stages_of_the_order(schedule: str) -> None:
    for layout in _layouts(schedule):
        if layout.pp == 1:
            continue
        order = build_schedule(layout, 2 * layout.num_stages)
        stages = stages_of_rank(layout_table([layout] * layout.pp), np.arange(layout.pp))
        for rank in range(layout.pp):
            assert tuple(sorted(stages[:, rank].tolist())) == order.stages_of_rank(rank)


def test_without_a_pipeline_one_microbatch_is_in_flight() -> None:
    table = layout_table([Layout(schedule="GPipe"), Layout(schedule="Interleaved1F1B", virtual_stages=4)])
    assert chunks_in_flight(table, np.array([8.0, 8.0]), np.zeros(2, np.int64)).tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (13, 4, [4, 3, 3, 3]),
        (4, 1, [4]),
        (4, 6, [0, 1, 1, 1, 1, 0]),
    ],
)
def test_blocks_are_split_evenly(num_blocks: int, num_stages: int, counts: list[int]) -> None:
    stages = np.arange(num_stages + 1)
    first = first_blocks(num_blocks, np.full(num_stages + 1, num_stages), stages)
    assert np.diff(first).tolist() == counts
    assert first[-1] == num_blocks
