"""SaveSchedule: after which steps a run saves; with checkpoint.interval = "auto" by what its steps and saves take.

A first save after a few steps shows what one takes; from then on the interval is that of Young and Daly, chosen again
after each of the first saves of an attempt. All ranks decide alike, by what they gather in the same steps. Which steps
are saved changes no bit of the training.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from meshwright.cost.chosen_interval import ChosenInterval
from meshwright.spec.job.job import Job

FIRST_SAVE: Final = 10
"""Steps of a run after which it saves first, where nothing is known of its saves."""
_NUM_REVIEWS: Final = 3
"""Saves of an attempt after which the interval is chosen."""
_RECENT_STEPS: Final = 50


@dataclass(frozen=True)
class SaveCost:
    """What the saves of one rank have taken in this attempt."""

    stalled_s: float
    """What training has waited for all of them."""
    commit_s: float | None
    """From the start of the longest until it was written; None before one is."""


class SaveSchedule:
    """The steps of one run after which it saves; each rank has one, and `review` is a collective."""

    def __init__(
        self,
        job: Job,
        num_ranks: int,
        start_step: int,
        gather: Callable[[Any], list[Any]],
        chosen: ChosenInterval | None = None,
    ) -> None:
        """`chosen` is what an earlier attempt has recorded, the same on all ranks."""
        interval = job.checkpoint.interval
        self._fixed = None if interval == "auto" else interval
        self._job, self._num_ranks, self._gather = job, num_ranks, gather
        self._multiple_of = job.train.validation_interval if job.checkpoint.keep_best else 0
        self._saved_step = start_step
        self._interval = chosen.steps if chosen is not None else self._first_interval
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last: tuple[float, float] | None = None
        """Time of the last review of a step, and all stalls by then."""
        self._review_step: int | None = None
        self._num_saves = 0

    @property
    def _first_interval(self) -> int:
        if self._job.cluster.failures_per_device_day == 0:
            return 0
        unit = max(1, self._multiple_of)
        return unit * -(-FIRST_SAVE // unit)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`."""
        if self._fixed is not None:
            return self._fixed > 0 and step % self._fixed == 0
        is_validated = not self._multiple_of or step % self._multiple_of == 0
        return 0 < self._interval <= step - self._saved_step and is_validated

    def is_any_due(self, num_steps: int) -> bool:
        """Return whether a checkpoint is due within the next so many steps."""
        return 0 < (self._interval if self._fixed is None else self._fixed) <= num_steps

    def saved(self, step: int) -> None:
        """Take note of a save that was started after `step`."""
        self._saved_step = step
        self._num_saves += 1
        if self._fixed is None and self._num_saves <= _NUM_REVIEWS:
            self._review_step = step + 1

    def review(self, step: int, cost: SaveCost) -> ChosenInterval | None:
        """Return the interval that is chosen after `step`, None where it stays; a collective, called after each step.

        A save in the background is waited for, by looking again after twice as many steps.
        """
        if self._fixed is not None:
            return None
        self._note_step(cost.stalled_s)
        if self._review_step is None or step < self._review_step or not self._steps_s:
            return None
        mine = (statistics.median(self._steps_s), cost.stalled_s / self._num_saves, cost.commit_s)
        steps_s, stalls_s, commits_s = zip(*self._gather(mine), strict=True)
        if None in commits_s:
            self._review_step = step + (step - self._saved_step)
            return None
        self._review_step = None
        chosen = ChosenInterval.of(
            max(steps_s),
            max(stalls_s),
            num_devices=self._num_ranks,
            failures_per_device_day=self._job.cluster.failures_per_device_day,
            # What training waits for is part of it.
            commit_s=max(commits_s),
            multiple_of=self._multiple_of,
        )
        self._interval = chosen.steps
        return chosen

    def _note_step(self, stalled_s: float) -> None:
        """Note what the step took, from the last one's end on, without its waits for saves."""
        now_s = time.perf_counter()
        if self._last is not None:
            last_s, last_stalled_s = self._last
            self._steps_s.append(max(1e-6, now_s - last_s - (stalled_s - last_stalled_s)))
        self._last = now_s, stalled_s
