"""Schedule: what every rank of a pipeline computes, in order; and the sends and receives that this takes."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

from pydantic import Field

from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import COMPUTE_KINDS, Action, is_csv, orders_from_csv
from meshwright.spec.layout.schedule.schedule_orders import order_of_rank
from meshwright.units import counted


class Schedule(Frozen):
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

    def of_microbatches(self, microbatches: Sequence[int]) -> Schedule:
        """Return what is left of the schedule when only some microbatches, ascending, are run: numbered from 0."""
        number = {microbatch: index for index, microbatch in enumerate(microbatches)}
        return Schedule(
            actions=tuple(
                tuple(one._replace(microbatch=number[one.microbatch]) for one in order if one.microbatch in number)
                for order in self.actions
            )
        )

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {action.stage: rank for rank, order in enumerate(self.actions) for action in order}


def build_schedule(layout: Layout, num_microbatches: int, csv_text: str | None = None) -> Schedule:
    """Return the schedule of a layout in which `schedule_problems` finds none.

    `csv_text` is what the file holds, if layout.schedule names one; raises ConfigError if that does not fit.
    """
    if not is_csv(layout):
        return Schedule(actions=tuple(order_of_rank(rank, layout, num_microbatches) for rank in range(layout.pp)))
    assert csv_text is not None, f"{layout.schedule} was not read"
    try:
        schedule = Schedule(actions=orders_from_csv(csv_text))
        _check_fit(schedule, layout, num_microbatches)
        check_schedule(schedule)
    except ConfigError as error:
        raise type(error)(f'layout.schedule = "{layout.schedule}": {error}') from error
    return schedule


def check_schedule(schedule: Schedule) -> None:
    """Raise ConfigError unless each stage runs each microbatch once each way, in an order that ends."""
    ranks = [{action.stage for action in order} for order in schedule.actions]
    for stage in range(schedule.num_stages):
        holders = [rank for rank, stages in enumerate(ranks) if stage in stages]
        if len(holders) != 1:
            where = " and ".join(str(rank) for rank in holders) or "none"
            raise ConfigError(f"stage {stage} is on pipeline ranks {where}: put all its actions in one row")
    counts = Counter(action for order in schedule.actions for action in order)
    for stage, microbatch in itertools.product(range(schedule.num_stages), range(schedule.num_microbatches)):
        times = {kind: counts[Action(kind, stage, microbatch)] for kind in COMPUTE_KINDS}
        if tuple(times.values()) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            found = ", ".join(f"{kind} {count} times" for kind, count in times.items())
            raise ConfigError(
                f"stage {stage} runs microbatch {microbatch} {found}: it needs F once, and B once or I and W once"
            )
    for _ in _time_steps(schedule):
        pass


def lower(schedule: Schedule) -> list[list[Action]]:
    """Return each rank's actions with sends and receives in their places.

    All ranks are simulated together. After each time step, every output that another rank needs is written down as a
    send there and a receive here, at one moment. So there is one global order of transfers that every rank keeps to.
    Of the transfers not yet done, the first in that order waits for nothing: both its ranks have done all theirs
    before it, and the computation in between needs only what has come. Therefore even sends that block until they are
    received cannot wait for each other in a circle.

    Receives are then posted one computation earlier, so that a message arrives while its receiver still computes. They
    wait for nothing when they are posted, and pass no transfer with the same rank: of each pair of ranks both list its
    transfers in the global order, as backends need that have a queue for each pair. The first transfer not yet done is
    then still the next one of its pair.
    """
    lowered: list[list[Action]] = [[] for _ in schedule.actions]
    for done in _time_steps(schedule):
        for rank, action in done:
            lowered[rank].append(action)
        # Only now, so that no rank has to receive the result of this time step before its own computation in it.
        for rank, action in done:
            transfer = _transfer(action, schedule)
            if transfer:
                send, receive = transfer
                lowered[rank].append(send)
                lowered[schedule.rank_of_stage(receive.stage)].append(receive)
    return [_receiving_early(order, schedule) for order in lowered]


def _receiving_early(order: Sequence[Action], schedule: Schedule) -> list[Action]:
    """Return a rank's actions with each receive before the computation that comes before it, where it can be."""
    early: list[Action] = []
    for action in order:
        place = len(early)
        if action.kind in ("RECV_F", "RECV_B"):
            for index in reversed(range(len(early))):
                if early[index].kind in COMPUTE_KINDS:
                    place = index
                    break
                if _peer(early[index], schedule) == _peer(action, schedule):
                    break
        early.insert(place, action)
    return early


def _peer(transfer: Action, schedule: Schedule) -> int:
    """Return the rank at the other end."""
    is_with_next = transfer.kind in ("SEND_F", "RECV_B")
    return schedule.rank_of_stage(transfer.stage + (1 if is_with_next else -1))


def _check_fit(schedule: Schedule, layout: Layout, num_microbatches: int) -> None:
    """Raise InfeasibleLayout unless the schedule has the layout's ranks and stages and the step's microbatches."""
    if not any(schedule.actions):
        raise ConfigError("it holds no action: write one row for each pipeline rank, such as 0F0,0B0")
    if len(schedule.actions) != layout.pp:
        raise InfeasibleLayout(
            f"it has {len(schedule.actions)} rows, one for each pipeline rank, but layout.pp = {layout.pp}: "
            f"set layout.pp to {len(schedule.actions)}"
        )
    for rank in range(layout.pp):
        stages = schedule.stages_of_rank(rank)
        if len(stages) != layout.stages_per_rank:
            raise InfeasibleLayout(
                f"row {rank + 1} has {len(stages)} stages, but layout.virtual_stages = {layout.stages_per_rank}: "
                f"set layout.virtual_stages to {max(1, len(stages))}, the same for every row"
            )
    if schedule.num_microbatches != num_microbatches:
        num_sequences = schedule.num_microbatches * layout.dp * layout.microbatch_size
        raise InfeasibleLayout(
            f"it runs {counted(schedule.num_microbatches, 'microbatch', 'microbatches')}, but a step has "
            f"{num_microbatches}: set "
            f"train.global_batch_size to {num_sequences}, or change layout.microbatch_size = {layout.microbatch_size}"
        )


def _time_steps(schedule: Schedule) -> Iterator[list[tuple[int, Action]]]:
    """Yield the (rank, action) of each time step: all ranks whose next action's inputs came in earlier steps run it.

    Raises ConfigError when no rank can.
    """
    waiting = [deque(order) for order in schedule.actions]
    done: set[Action] = set()
    while any(waiting):
        runnable = [rank for rank, queue in enumerate(waiting) if queue and _inputs(queue[0], schedule) <= done]
        if not runnable:
            stuck = ", ".join(f"rank {rank} before {queue[0]}" for rank, queue in enumerate(waiting) if queue)
            raise ConfigError(f"no pipeline rank can go on, each waits for another or for itself: {stuck}")
        step = [(rank, waiting[rank].popleft()) for rank in runnable]
        done |= {action._replace(kind="F" if action.kind == "F" else "B") for _, action in step}
        yield step


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
