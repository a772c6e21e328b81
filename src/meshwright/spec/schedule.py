"""Schedule: what every rank of a pipeline computes, in order; and the sends and receives that this takes."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Annotated

from pydantic import Field

from meshwright.spec.action import Action
from meshwright.spec.layout import Layout
from meshwright.spec.noun import Noun
from meshwright.spec.schedule_orders import order_of_rank


class Schedule(Noun):
    """One step of a pipeline: the compute actions of each of its ranks, in order."""

    actions: Annotated[tuple[tuple[Action, ...], ...], Field(strict=False)]
    """For each pipeline rank its forwards and backwards; sends and receives follow from them."""

    @cached_property
    def num_stages(self) -> int:
        """Return the number of stages over all pipeline ranks."""
        return 1 + max(action.stage for order in self.actions for action in order)

    @cached_property
    def num_microbatches(self) -> int:
        """Return the number of microbatches of one step."""
        return 1 + max(action.microbatch for order in self.actions for action in order)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that pipeline rank `rank` holds, ascending."""
        return tuple(sorted({action.stage for action in self.actions[rank]}))

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds `stage`."""
        return self._ranks[stage]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {action.stage: rank for rank, order in enumerate(self.actions) for action in order}


def build_schedule(layout: Layout, num_microbatches: int, csv_text: str | None = None) -> Schedule:
    """Return the schedule that a valid layout names; `csv_text` is what the file holds, if it names one."""
    return Schedule(actions=tuple(order_of_rank(rank, layout, num_microbatches) for rank in range(layout.pp)))


def lower(schedule: Schedule) -> list[list[Action]]:
    """Return each rank's actions with sends and receives in their places.

    All ranks are played together in time steps. In each, every rank runs its next action if the inputs have arrived;
    then each output that another rank needs is written down as a SEND there and a RECV here at one moment. So one
    global order of transfers exists that every rank keeps to. Of the transfers that are not done, the first in that
    order has nothing to wait for on either side: all that both ranks do before it is done. Therefore even sends that
    block until they are received cannot wait for each other in a circle.
    """
    lowered: list[list[Action]] = [[] for _ in schedule.actions]
    waiting = [deque(order) for order in schedule.actions]
    arrived: set[Action] = set()
    while any(waiting):
        runnable = [rank for rank, queue in enumerate(waiting) if queue and _inputs(queue[0], schedule) <= arrived]
        assert runnable, f"a deadlock: {[str(queue[0]) for queue in waiting if queue]}"
        done = [(rank, waiting[rank].popleft()) for rank in runnable]
        for rank, action in done:
            lowered[rank].append(action)
            arrived.add(action._replace(kind="F" if action.kind == "F" else "B"))
        for rank, action in done:
            transfer = _transfer(action, schedule)
            if transfer:
                send, receive = transfer
                lowered[rank].append(send)
                lowered[schedule.rank_of_stage(receive.stage)].append(receive)
    return lowered


def _inputs(action: Action, schedule: Schedule) -> set[Action]:
    """Return the forwards and backwards, whole or to the inputs, that have to be done before `action`."""
    kind, stage, microbatch = action
    if kind == "F":
        return {Action("F", stage - 1, microbatch)} if stage > 0 else set()
    inputs = {Action("F", stage, microbatch)}
    if kind == "W":
        inputs.add(Action("B", stage, microbatch))
    elif stage < schedule.num_stages - 1:
        inputs.add(Action("B", stage + 1, microbatch))
    return inputs


def _transfer(action: Action, schedule: Schedule) -> tuple[Action, Action] | None:
    """Return the send and the receive of what `action` makes, or None if no other rank needs it."""
    kind, stage, microbatch = action
    target = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= target < schedule.num_stages:
        return None
    if schedule.rank_of_stage(target) == schedule.rank_of_stage(stage):
        return None
    if kind == "F":
        return Action("SEND_F", stage, microbatch), Action("RECV_F", target, microbatch)
    return Action("SEND_B", stage, microbatch), Action("RECV_B", target, microbatch)
