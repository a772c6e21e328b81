"""Blocks of pipeline ranks, and microbatches in flight: the closed forms against the orders played action by action."""

import itertools

import numpy as np
import pytest

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint_stages import (
    StageCuts,
    backward_rounds,
    chunks_in_flight,
    fullest_moments,
    losses_in_flight,
    losses_pending,
    stages_of_rank,
)
from meshwright.cost.training_setup import TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import (
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    Layout,
)
from meshwright.spec.layout.schedule.action import Action
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.layout.stage_split import stage_boundaries
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import Workload
from schedules import peak_in_flight

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
def test_losses_in_flight_are_those_of_the_order(schedule: str) -> None:
    """The backward to the inputs frees what the loss keeps."""
    change, num_compared = {"F": 1, "B": -1, "I": -1, "W": 0}, 0
    for layout, number in itertools.product(_layouts(schedule), NUM_MICROBATCHES):
        if layout.pp == 1 or schedule_problems(layout, number):
            continue
        order = build_schedule(layout, number)
        last = layout.num_stages - 1
        actions = [action for action in order.actions[order.rank_of_stage(last)] if action.stage == last]
        most = max(itertools.accumulate(change[action.kind] for action in actions))
        found = losses_in_flight(layout_table([layout]), np.array([float(number)]))
        assert found.tolist() == [most], f"{layout.schedule} {layout.pp} x {number}"
        num_compared += 1
    assert num_compared >= 10


@pytest.mark.parametrize("gradient_bytes", [0.5, 2.0, 20.0])
def test_gradients_next_to_chunks_in_flight_are_those_of_the_order(gradient_bytes: float) -> None:
    """A chunk in flight weighs 1, the gradients of a stage that has run a backward `gradient_bytes`."""
    num_compared = 0
    for layout, number in itertools.product(_layouts("Interleaved1F1B"), NUM_MICROBATCHES):
        if layout.pp == 1 or schedule_problems(layout, number):
            continue
        table, ranks, stages = layout_table([layout] * layout.pp), np.arange(layout.pp), layout.stages_per_rank
        microbatches = np.full(layout.pp, float(number))
        rounds = backward_rounds(table, microbatches, ranks)
        gradients = np.max([gradient_bytes * stages * begun - freed for begun, freed in rounds], axis=0)
        fullest = chunks_in_flight(table, microbatches, ranks) + gradients
        orders = build_schedule(layout, number).actions
        assert fullest.tolist() == [_fullest_with_sums(order, gradient_bytes) for order in orders], f"{layout} {number}"
        num_compared += 1
    assert num_compared >= 10


def _fullest_with_sums(order: tuple[Action, ...], gradient_bytes: float) -> float:
    """Return the most of a rank's chunks and gradients, those of a stage since its first backward."""
    held, begun, most = 0, set[int](), 0.0
    for action in order:
        held += action.kind == "F"
        begun |= {action.stage} if action.kind == "B" else set()
        most = max(most, held + gradient_bytes * len(begun))
        held -= action.kind == "B"
    return most


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD_SCHEDULES)
@pytest.mark.parametrize("gradient_bytes", [0.25, 0.5, 1.0, 4.0, 16.0])
def test_pending_weight_passes_are_those_of_the_order(schedule: str, gradient_bytes: float) -> None:
    """A chunk in flight weighs 1, the gradients of one that is pending `gradient_bytes`."""
    num_compared = 0
    for layout, number in itertools.product(_layouts(schedule), NUM_MICROBATCHES):
        if layout.pp == 1 or schedule_problems(layout, number):
            continue
        if schedule == "ZBVZeroBubble" and layout.pp < number < 2 * layout.pp:
            continue
        moments = fullest_moments(
            layout_table([layout] * layout.pp), np.full(layout.pp, float(number)), np.arange(layout.pp)
        )
        fullest = np.max([chunks + gradient_bytes * pending for chunks, pending in moments], axis=0)
        orders = build_schedule(layout, number).actions
        assert fullest.tolist() == [_fullest(order, gradient_bytes) for order in orders], f"{layout.pp} x {number}"
        num_compared += 1
    assert num_compared >= 5


def _fullest(order: tuple[Action, ...], gradient_bytes: float) -> float:
    change = {"F": 1.0, "B": -1.0, "I": gradient_bytes, "W": -1 - gradient_bytes}
    return max(itertools.accumulate(change[action.kind] for action in order))


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


def _setup(num_blocks: int, stages: str) -> TrainingSetup:
    architecture = PRESETS["llama3-8b"].replace(num_layers=num_blocks)
    stack = Stack(name="any", title="any", stages=stages)
    workload = Workload(seq_len=4096, global_batch_size=8)
    return TrainingSetup(model_spec(architecture), workload, load_cluster("h100-ib400"), stack)


def _counts(setup: TrainingSetup, num_stages: int) -> list[int]:
    """Return the blocks of each stage."""
    stages = np.arange(num_stages + 1)
    first = StageCuts(setup, layout_table([Layout(pp=num_stages)] * (num_stages + 1))).first_block(stages)
    assert first[0] == 0
    return np.diff(first).tolist()


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
    assert _counts(_setup(num_blocks, "even"), num_stages) == counts


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
def test_balanced_stages_are_those_that_the_runtime_cuts(num_stages: int) -> None:
    setup = _setup(32, "balanced")
    boundaries = stage_boundaries(Layout(pp=num_stages), setup.model, setup.workload.seq_len)
    assert _counts(setup, num_stages) == np.diff([0, *boundaries, 32]).tolist()


def test_too_few_blocks_for_balance_are_split_evenly() -> None:
    assert _counts(_setup(2, "balanced"), 8) == _counts(_setup(2, "even"), 8)


def test_losses_wait_for_their_weights_on_the_last_rank_of_zero_bubble_in_rounds() -> None:
    schedules = ("InterleavedZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B", "ZBVZeroBubble")
    layouts = layout_table([Layout(pp=4, schedule=schedule, virtual_stages=2) for schedule in schedules])
    number = np.array([8.0, 4.0, 8.0, 8.0])
    assert losses_pending(layouts, number, np.array([3, 3, 3, 0])).tolist() == [3, 0, 0, 0]
