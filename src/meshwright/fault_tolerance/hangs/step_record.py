"""Collectives that this rank has entered, each with its step, phase and module.

Every step of a rank calls the same collectives in the same order, over all its groups. So the k-th collective of a
later step is the k-th of an early step, and the first that differs is where the rank diverged.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshwright.parallelism.module_tracker import ModuleTracker
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_flight_recorder import (
    RecordedCollective,
    recorded_collectives,
    recorded_groups,
)
from meshwright.spec.layout.schedule.action import ACTION_MARK
from meshwright.spec.run.rank_records import Collective, Departure, ProcessGroupRecord

# Phases whose collectives are the same in every step.
_STEP_PHASES = ("data", "sends", "gradients", "optimizer")
_NUM_KEPT = 1000


class StepRecord:
    """torch's flight record of this rank, joined with the phases of the training loop."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._phases: list[tuple[int, str]] = []
        self._tracker: ModuleTracker | None = None
        self._order: CollectiveOrder | None = None

    def begin(self, step: int) -> None:
        """Start a step and clear the phases of the previous one."""
        self._step = step
        self._phases.clear()

    def enter_phase(self, phase: str) -> None:
        """Record the start of a phase."""
        self._phases.append((time.time_ns(), phase))

    @contextmanager
    def tracking(self, stages: Stages) -> Iterator[None]:
        """Record the order of the collectives, and the module of each, in the step that runs within the context."""
        with ModuleTracker(stages) as self._tracker:
            yield
        step = [one for one in self._collectives() if _is_in_step(one)]
        self._tracker = None
        self._order = CollectiveOrder(step)

    def collectives(self) -> tuple[list[Collective], Collective | None, Departure | None]:
        """Return the newest collectives, the next one by the recorded order, and where they diverge from it."""
        found = self._collectives()
        in_step = [one for one in found if _is_in_step(one)]
        expected, departure = None, None
        # If the recorder has dropped the start of the step, positions in the order are unknown.
        if self._order is not None and len(in_step) < len(found):
            placed, departure = self._order.placed(in_step)
            expected = None if departure else self._order.after(in_step)
            found = [*(one for one in found if not _is_in_step(one)), *placed]
        return _newest(found), expected, departure

    def _collectives(self) -> list[Collective]:
        named = {group.name for group in groups()}
        return [self._annotated(one) for one in recorded_collectives() if one.group in named]

    def _annotated(self, one: RecordedCollective) -> Collective:
        """Return one collective with the step, phase and module at the time when it was entered."""
        phase = _latest(self._phases, one.entered_ns)
        module = None if phase is None or self._tracker is None else _latest(self._tracker.marks, one.entered_ns)
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


def groups() -> list[ProcessGroupRecord]:
    """Return the process groups of this rank with several ranks."""
    return [
        ProcessGroupRecord(name=one.name, axis=_axis(one.description), ranks=one.ranks)
        for one in recorded_groups()
        if one.ranks[1:]
    ]


def _axis(description: str) -> str:
    return "world" if description == "default_pg" else description.removeprefix("mesh_")


def _latest(marks: Sequence[tuple[int, str]], moment_ns: int) -> str | None:
    """Return the newest mark up to a moment."""
    place = bisect_right(marks, moment_ns, key=lambda mark: mark[0])
    return marks[place - 1][1] if place else None


def _is_in_step(one: Collective) -> bool:
    return one.phase is not None and (one.phase in _STEP_PHASES or one.phase.startswith(ACTION_MARK))


def _newest(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the newest collectives, and the last one of each group."""
    last = {one.group: place for place, one in enumerate(collectives)}
    oldest = len(collectives) - _NUM_KEPT
    return [one for place, one in enumerate(collectives) if place >= oldest or place == last[one.group]]


class CollectiveOrder:
    """The collectives of one step of one rank, in order."""

    def __init__(self, step: Sequence[Collective]) -> None:
        self._known = list(step)

    def placed(self, step: Sequence[Collective]) -> tuple[list[Collective], Departure | None]:
        """Return `step`'s collectives with their modules, and where they diverge from the order.

        From there on modules are unknown.
        """
        for place, found in enumerate(step):
            known = self._at(place)
            if known is None or _kind(known) != _kind(found):
                is_skip = any(_kind(later) == _kind(found) for later in self._known[place + 1 :])
                departure = Departure(found=found, known=known, is_skip=is_skip)
                return [*self._with_modules(step[:place]), *step[place:]], departure
        return self._with_modules(step), None

    def after(self, step: Sequence[Collective]) -> Collective | None:
        """Return the collective after those of `step`, None after the last; its sequence number is unknown (0)."""
        known = self._at(len(step))
        return None if known is None else known.replace(sequence=0, is_done=False)

    def _at(self, place: int) -> Collective | None:
        return self._known[place] if place < len(self._known) else None

    def _with_modules(self, step: Sequence[Collective]) -> list[Collective]:
        return [found.replace(module=known.module) for found, known in zip(step, self._known, strict=False)]


def _kind(one: Collective) -> tuple[str, str, list[list[int]]]:
    return one.group, one.op, one.sizes
