"""StepRecord: which collectives this rank has entered, each with its step, phase and module."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshwright.fault_tolerance.collective_order import CollectiveOrder
from meshwright.parallelism.module_tracker import ModuleTracker
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_flight_recorder import (
    RecordedCollective,
    recorded_collectives,
    recorded_groups,
)
from meshwright.spec.layout.schedule.action import ACTION_MARK
from meshwright.spec.run.flight_record import Collective, Departure, Group

# Phases whose collectives are the same in every step.
_STEP_PHASES = ("data", "sends", "gradients", "optimizer")
_NUM_KEPT = 1000


class StepRecord:
    """What the marks of this rank's loop say about torch's flight record."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._phases: list[tuple[int, str]] = []
        self._trail: ModuleTracker | None = None
        self._order: CollectiveOrder | None = None

    def begin(self, step: int) -> None:
        """Forget the marks of the step before."""
        self._step = step
        self._phases.clear()

    def note(self, phase: str) -> None:
        """Remember when a phase began."""
        self._phases.append((time.time_ns(), phase))

    @contextmanager
    def learning(self, stages: Stages) -> Iterator[None]:
        """Learn the order of the collectives, and the module of each, from the step that runs meanwhile."""
        with ModuleTracker(stages) as self._trail:
            yield
        step = [one for one in self._collectives() if _is_in_step(one)]
        self._trail = None
        self._order = CollectiveOrder(step)

    def collectives(self) -> tuple[list[Collective], Collective | None, Departure | None]:
        """Return the newest collectives, the one that the order says comes next, and where they depart from it."""
        found = self._collectives()
        in_step = [one for one in found if _is_in_step(one)]
        expected, departure = None, None
        # Where the recorder has lost the beginning of the step, nobody knows which of them is the first.
        if self._order is not None and len(in_step) < len(found):
            placed, departure = self._order.placed(in_step)
            expected = None if departure else self._order.after(in_step)
            found = [*(one for one in found if not _is_in_step(one)), *placed]
        return _newest(found), expected, departure

    def _collectives(self) -> list[Collective]:
        named = {group.name for group in groups()}
        return [self._noted(one) for one in recorded_collectives() if one.group in named]

    def _noted(self, one: RecordedCollective) -> Collective:
        """Return one collective with what the marks say of the time at which it was entered."""
        phase = _latest(self._phases, one.entered_ns)
        module = None if phase is None or self._trail is None else _latest(self._trail.marks, one.entered_ns)
        step = None if phase is None else self._step
        return Collective(
            group=one.group,
            sequence=one.sequence,
            op=one.op,
            sizes=one.sizes,
            is_done=one.is_done,
            step=step,
            phase=phase,
            module=module,
        )


def groups() -> list[Group]:
    """Return the process groups that this rank shares with others."""
    return [
        Group(name=one.name, axis=_axis(one.description), ranks=one.ranks) for one in recorded_groups() if one.ranks[1:]
    ]


def _axis(description: str) -> str:
    return "world" if description == "default_pg" else description.removeprefix("mesh_")


def _latest(marks: Sequence[tuple[int, str]], moment_ns: int) -> str | None:
    """Return the newest mark that is not after a moment."""
    place = bisect_right(marks, moment_ns, key=lambda mark: mark[0])
    return marks[place - 1][1] if place else None


def _is_in_step(one: Collective) -> bool:
    return one.phase is not None and (one.phase in _STEP_PHASES or one.phase.startswith(ACTION_MARK))


def _newest(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the newest collectives, and the last one of each group however old."""
    last = {one.group: place for place, one in enumerate(collectives)}
    oldest = len(collectives) - _NUM_KEPT
    return [one for place, one in enumerate(collectives) if place >= oldest or place == last[one.group]]
