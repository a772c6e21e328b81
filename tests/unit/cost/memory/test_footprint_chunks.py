"""What chunks of unequal stages take: the counts of a few rounds against whole orders, action by action."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint_chunks import ChunkBytes, held_bytes
from meshwright.cost.memory.footprint_stages import chunks_in_flight, stages_of_rank
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems

LOOPED = [
    (Layout(pp=pp, schedule=schedule, virtual_stages=stages), number)
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    for pp, stages, number in itertools.product((2, 3, 4, 8), (2, 3, 4), (1, 2, 4, 6, 8, 12, 16, 24))
]
V = [
    (Layout(pp=pp, schedule=schedule), number)
    for schedule in ("ZBVZeroBubble", "DualPipeV")
    for pp, number in itertools.product((2, 3, 4, 8), (4, 8, 12, 16, 24, 40))
]
PIPELINES = [(layout, number) for layout, number in LOOPED + V if not schedule_problems(layout, number)]
ONE, NONE = np.ones(1), np.zeros(1)


@pytest.mark.slow
@given(st.sampled_from(PIPELINES), st.data())
def test_chunks_of_unequal_stages_are_those_of_the_order(pipeline: tuple[Layout, int], data: st.DataObject) -> None:
    layout, number = pipeline
    rank = data.draw(st.integers(0, layout.pp - 1))
    blocks = data.draw(
        st.lists(st.integers(0, 5), min_size=layout.stages_per_rank, max_size=layout.stages_per_rank).filter(
            lambda counts: len(set(counts)) > 1
        )
    )
    chunk = ChunkBytes(*(float(data.draw(st.integers(0, 3))) * ONE for _ in range(3)))
    held = held_bytes(
        layout_table([layout]),
        np.array([float(number)]),
        np.array([rank]),
        np.array([[count] for count in blocks]),
        chunk,
    )
    most, at_loss = _counted(layout, number, rank, blocks, [float(size[0]) for size in chunk])
    assert held.most[0] == pytest.approx(most)
    assert held.at_loss[0] == pytest.approx(most if at_loss is None else at_loss)


def _counted(
    layout: Layout, number: int, rank: int, blocks: list[int], chunk: list[float]
) -> tuple[float, float | None]:
    """Return the most bytes after any forward or backward to inputs, and after one of the last stage if it is here."""
    stages = stages_of_rank(layout_table([layout]), np.array([rank]))[:, 0].tolist()
    weight = {stage: count / np.mean(blocks) for stage, count in zip(stages, blocks, strict=True)}
    last = layout.num_stages - 1
    held: list[int] = []
    pending: list[int] = []
    found: list[tuple[bool, float]] = []
    for action in build_schedule(layout, number).actions[rank]:
        if action.kind == "F":
            held.append(action.stage)
        if action.kind == "I":
            pending.append(action.stage)
        ends = pending.count(last) - (action.stage == last)
        values = sum(weight[stage] for stage in held), sum(weight[stage] for stage in pending), max(ends, 0)
        if action.kind != "W":
            found.append((action.stage == last, sum(size * value for size, value in zip(chunk, values, strict=True))))
        if action.kind in "BW":
            held.remove(action.stage)
        if action.kind == "W":
            pending.remove(action.stage)
    at_loss = [size for is_loss, size in found if is_loss]
    return max(size for _, size in found), max(at_loss) if at_loss else None


def test_a_last_stage_without_blocks_leaves_more_of_the_others() -> None:
    layouts = layout_table([Layout(pp=4, schedule="InterleavedZeroBubble", virtual_stages=2)])
    number, rank = np.array([32.0]), np.array([3])
    uneven = held_bytes(layouts, number, rank, np.array([[3], [0]]), ChunkBytes(ONE, NONE, NONE))
    assert (uneven.most[0] * 3 / 2, uneven.at_loss[0] * 3 / 2) == (8 * 3, 7 * 3)
    assert chunks_in_flight(layouts, number, rank)[0] * 3 / 2 == 8 * 3 / 2


def test_other_schedules_hold_chunks_of_the_average_stage() -> None:
    layouts = layout_table([Layout(pp=4), Layout(pp=4, schedule="LoopedBFS", virtual_stages=2), Layout()])
    number, rank = np.full(3, 8.0), np.array([3, 3, 0])
    chunk = ChunkBytes(np.ones(3), np.zeros(3), np.zeros(3))
    held = held_bytes(layouts, number, rank, np.array([[3, 3, 4], [0, 0, 0]]), chunk)
    assert held.most.tolist() == held.at_loss.tolist() == chunks_in_flight(layouts, number, rank).tolist()
