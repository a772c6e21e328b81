"""Our orders are torch's, action by action; torch makes them here from stand-ins for its stages, without processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.action import orders_from_csv, orders_to_csv, parse_cell
from meshwright.spec.layout.schedule.schedule import build_schedule, lower
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems

Orders = list[list[str]]

MULTI_STAGE = [
    *[(name, num_stages) for name in LOOPED_SCHEDULES for num_stages in (1, 2, 3)],
    *[(name, 2) for name in V_SCHEDULES],
]


def stage(pp: int, rank: int, num_stages: int) -> Any:
    """Return a stand-in that notes what is called on it and has nothing to send or receive."""
    stand_in = mock.MagicMock(
        group_size=pp, group_rank=rank, stage_index=rank, num_stages=num_stages, submod=None, is_last=rank == pp - 1
    )
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stand_in, name).return_value = []
    return stand_in


def torch_schedule(layout: Layout, num_microbatches: int) -> PipelineScheduleMulti:
    """Return torch's own schedule of several stages; raises ValueError for what torch refuses."""
    stages = [stage(layout.pp, 0, layout.num_stages) for _ in range(layout.stages_per_rank)]
    schedule = get_schedule_class(layout.schedule)(stages, num_microbatches)
    assert isinstance(schedule, PipelineScheduleMulti)
    return schedule


def multi_stage_orders(layout: Layout, num_microbatches: int) -> Orders:
    order = torch_schedule(layout, num_microbatches).pipeline_order
    return [flatten(order[rank]) for rank in range(layout.pp)]


def flatten(cells: list[Any]) -> list[str]:
    return [str(action) for cell in cells if cell is not None for action in parse_cell(str(cell))]


def single_stage_orders(layout: Layout, num_microbatches: int) -> Orders:
    """Return what torch runs on each rank: it lists these orders too, but begins 1F1B's last rank at microbatch 1."""
    return [_run_single_stage(layout, rank, num_microbatches) for rank in range(layout.pp)]


def _run_single_stage(layout: Layout, rank: int, num_microbatches: int) -> list[str]:
    stand_in = stage(layout.pp, rank, layout.num_stages)
    schedule: Any = get_schedule_class(layout.schedule)(stand_in, num_microbatches)
    nothing: list[tuple[()]] = [()] * num_microbatches
    with mock.patch.object(type(schedule), "_initialize_stage"):
        schedule._step_microbatches(nothing, [{} for _ in nothing])
    kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
    return [f"{rank}{kinds[name]}{args[0]}" for name, args, _ in stand_in.method_calls if name in kinds]


def our_orders(layout: Layout, num_microbatches: int) -> Orders:
    return [[str(action) for action in order] for order in build_schedule(layout, num_microbatches).actions]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", SINGLE_STAGE_SCHEDULES)
def test_orders_of_single_stages_are_torchs(name: str, pp: int) -> None:
    layout = Layout(pp=pp, schedule=name)
    for num_microbatches in (pp, pp + 1, 2 * pp, 2 * pp + 3):
        assert our_orders(layout, num_microbatches) == single_stage_orders(layout, num_microbatches)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("name", "num_stages"), MULTI_STAGE)
def test_orders_of_several_stages_are_torchs(name: str, num_stages: int, pp: int) -> None:
    layout = Layout(pp=pp, schedule=name, virtual_stages=num_stages)
    # Fewer microbatches than ranks, rounds that are not as long as there are ranks, and just as long.
    candidates = (1, pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 2, 3 * pp)
    valid = [number for number in sorted(set(candidates)) if not schedule_problems(layout, number)]
    assert 3 * pp in valid
    for num_microbatches in valid:
        assert our_orders(layout, num_microbatches) == multi_stage_orders(layout, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_torch_refuses_has_a_named_problem_and_nothing_else_has(name: str) -> None:
    orders = single_stage_orders if name in SINGLE_STAGE_SCHEDULES else multi_stage_orders
    for num_stages in (1,) if name in SINGLE_STAGE_SCHEDULES else (1, 2, 3):
        layout = Layout(pp=3, schedule=name, virtual_stages=num_stages)
        for num_microbatches in range(1, 9):
            try:
                orders(layout, num_microbatches)
            except ValueError:
                assert schedule_problems(layout, num_microbatches), (layout, num_microbatches)
            else:
                assert not schedule_problems(layout, num_microbatches), (layout, num_microbatches)


@pytest.mark.parametrize("name", [*LOOPED_SCHEDULES, *V_SCHEDULES])
def test_each_rank_makes_the_transfers_that_torch_makes(name: str) -> None:
    layout = Layout(pp=4, schedule=name)
    theirs = torch_schedule(layout, 8).pipeline_order_with_comms  # type: ignore[attr-defined]
    for rank, order in enumerate(lower(build_schedule(layout, 8))):
        ours = Counter(str(action) for action in order if "_" in action.kind)
        assert ours == Counter(
            str(action) for action in theirs[rank] if action.computation_type.value.startswith(("SEND", "RECV"))
        )


@pytest.mark.parametrize("name", [*LOOPED_SCHEDULES, *V_SCHEDULES])
def test_a_file_travels_between_torch_and_here(name: str, tmp_path: Path) -> None:
    layout, file = Layout(pp=2, schedule=name), tmp_path / "schedule.csv"
    schedule = build_schedule(layout, 4)
    theirs = torch_schedule(layout, 4)
    theirs._dump_csv(file, "compute_only")  # type: ignore[call-arg]
    assert orders_from_csv(file.read_text()) == schedule.actions

    file.write_text(orders_to_csv(schedule.actions))
    theirs._load_csv(file)
    assert [flatten(theirs.pipeline_order[rank]) for rank in range(2)] == our_orders(layout, 4)
