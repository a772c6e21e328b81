"""Which of a step's microbatches are enough to tell all of it.

The first forward on a stage gathers parameters, the first backward makes gradients, the last one reduces them; all
other microbatches do the same. Two of these are taken besides: what the second has of the first, each has of the one
before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.layout.schedule.action import Action
from meshwright.spec.layout.schedule.schedule import Schedule

_NUM_STEADY = 2


@dataclass(frozen=True)
class Chosen:
    """Some of a step's microbatches, ascending; a trace of them numbers them from 0."""

    num_microbatches: int
    """Of the whole step."""
    microbatches: tuple[int, ...]
    steady: tuple[int, int]
    """Positions of the two that stand for all that were not chosen."""


def choose_microbatches(schedule: Schedule) -> Chosen | None:
    """Return the microbatches to trace, or None if all of them have to be."""
    count = schedule.num_microbatches
    ends = {order[end].microbatch for order in _orders(schedule) for end in (0, -1)}
    others = [number for number in range(count) if number not in ends]
    if len(others) <= _NUM_STEADY:
        return None
    chosen = sorted(ends.union(others[:_NUM_STEADY]))
    first, second = (chosen.index(number) for number in others[:_NUM_STEADY])
    return Chosen(count, tuple(chosen), (first, second))


def _orders(schedule: Schedule) -> list[list[Action]]:
    """Return the actions of each kind on each stage, in order."""
    orders: dict[tuple[str, int], list[Action]] = {}
    for rank in schedule.actions:
        for action in rank:
            orders.setdefault((action.kind, action.stage), []).append(action)
    return list(orders.values())
