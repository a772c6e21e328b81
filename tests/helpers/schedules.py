"""What a schedule holds in memory."""

from __future__ import annotations

import itertools

from meshwright.spec.layout.schedule.schedule import Schedule


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank how many microbatches' activations it holds at most, counting each of its stages.

    They are held from the forward to the end of the backward: to the weights, where it is split.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return tuple(
        max(itertools.accumulate(change[action.kind] for action in order), default=0) for order in schedule.actions
    )
