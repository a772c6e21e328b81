"""Chunks in flight of unequal stages: the closed form against the orders, counted action by action."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.footprint_chunks import chunks_held
from meshwright.cost.footprint_stages import chunks_in_flight
from meshwright.cost.layout_table import layout_table
from meshwright.spec.layout import Layout
from meshwright.spec.schedule import build_schedule
from meshwright.spec.schedule_rules import schedule_problems

PIPELINES = [
    (Layout(pp=pp, schedule="Interleaved1F1B", virtual_stages=stages), number)
    for pp, stages, number in itertools.product((2, 3, 4, 8), (2, 3, 4), (1, 2, 4, 6, 8, 12, 16, 24))
]
PIPELINES = [(layout, number) for layout, number in PIPELINES if not schedule_problems(layout, number)]


@given(st.sampled_from(PIPELINES), st.data())
def test_chunks_of_unequal_stages_are_those_of_the_order(pipeline: tuple[Layout, int], data: st.DataObject) -> None:
    layout, number = pipeline
    rank = data.draw(st.integers(0, layout.pp - 1))
    blocks = data.draw(st.lists(st.integers(0, 5), min_size=layout.stages_per_rank, max_size=layout.stages_per_rank))
    held = chunks_held(
        layout_table([layout]), np.array([float(number)]), np.array([rank]), np.array([[count] for count in blocks])
    )
    if len(set(blocks)) == 1:
        blocks = [1] * len(blocks)
    weight = np.array(blocks) / np.mean(blocks)
    most, at_loss = _counted(layout, number, rank, weight.tolist())
    assert held.most[0] == pytest.approx(most)
    assert held.at_loss[0] == pytest.approx(at_loss if rank == layout.pp - 1 else most)


def _counted(layout: Layout, number: int, rank: int, weight: list[float]) -> tuple[float, float]:
    """Return what is in flight at most, and at most while the last stage's forward runs (0 without that stage)."""
    held, most, at_loss = 0.0, 0.0, 0.0
    for action in build_schedule(layout, number).actions[rank]:
        held += weight[action.stage // layout.pp] * (1 if action.kind == "F" else -1)
        most = max(most, held)
        if action.kind == "F" and action.stage == layout.num_stages - 1:
            at_loss = max(at_loss, held)
    return most, at_loss


def test_other_schedules_hold_chunks_of_the_average_stage() -> None:
    layouts = layout_table([Layout(pp=4), Layout(pp=4, schedule="LoopedBFS", virtual_stages=2), Layout()])
    number, rank = np.full(3, 8.0), np.array([3, 3, 0])
    held = chunks_held(layouts, number, rank, np.array([[3, 3, 4], [0, 0, 0]]))
    assert held.most.tolist() == held.at_loss.tolist() == chunks_in_flight(layouts, number, rank).tolist()
