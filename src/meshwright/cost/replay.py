"""Replay of a pipeline's schedule: when its last rank is done, action by action.

Each rank runs its actions in their order; one starts when the rank is free and its input is there: a forward after that
of the stage before, a backward after that of the stage behind, `transfer_s` later where another rank computed it.
Ignored: contention between transfers, and anything that makes one microbatch slower than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.action import Action


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes on each stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """The whole backward."""
    weight_s: Sequence[float]
    """The part of the backward that makes the gradients of the weights, where it runs apart."""
    repeats: bool = False
    """Whether a backward that runs in two parts runs whole in each, as that of compiled blocks does."""
    input_s: Sequence[float] | None = None
    """The part that makes the gradients of the inputs; None for what the other part leaves of the whole."""


def replay_s(orders: Sequence[Sequence[Action]], times: StageTimes, transfer_s: float) -> float:
    """Return the seconds from the first forward to the end of the last rank's last action.

    `orders` holds each rank's actions; those of a schedule that `check_schedule` accepts always end.
    """
    num_stages = len(times.forward_s)
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    # From the stage before to a stage, and from the stage behind.
    lags = [0.0 if rank_of[stage] == rank_of[stage - 1] else transfer_s for stage in range(1, num_stages)]
    forward_lag, backward_lag = [0.0, *lags], [*lags, 0.0]
    left_s = [whole - weight for whole, weight in zip(times.backward_s, times.weight_s, strict=True)]
    inputs_s = left_s if times.input_s is None else times.input_s
    duration_s = {
        "F": times.forward_s,
        "B": times.backward_s,
        "I": times.backward_s if times.repeats else inputs_s,
        "W": times.backward_s if times.repeats else times.weight_s,
    }
    forward_end: list[dict[int, float]] = [{} for _ in range(num_stages)]
    backward_end: list[dict[int, float]] = [{} for _ in range(num_stages)]
    clocks, positions = [0.0] * len(orders), [0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            clock, position = clocks[rank], positions[rank]
            while position < len(order):
                kind, stage, microbatch = order[position]
                ready: float | None = 0.0
                if kind == "F" and stage > 0:
                    ready = forward_end[stage - 1].get(microbatch)
                    lag = forward_lag[stage]
                elif kind in "BI" and stage < num_stages - 1:
                    ready = backward_end[stage + 1].get(microbatch)
                    lag = backward_lag[stage]
                else:
                    lag = 0.0
                if ready is None:
                    break
                clock = max(clock, ready + lag) + duration_s[kind][stage]
                if kind == "F":
                    forward_end[stage][microbatch] = clock
                elif kind != "W":
                    backward_end[stage][microbatch] = clock
                position += 1
            is_moving = is_moving or position > positions[rank]
            clocks[rank], positions[rank] = clock, position
    assert all(position == len(order) for position, order in zip(positions, orders, strict=True)), (
        "ranks wait in a circle"
    )
    return max(clocks)
