"""Goodput: which share of a run's time went into steps that count, and what took the rest.

    goodput = (time in steps that count - their waits for data) / (time from the launch to the end)

Each moment has one cause. Steps are those of metrics.jsonl, all else is of events.jsonl; a run without that file has
steps, and gaps between them, only. What the first steps of an attempt take beyond the mean of later ones, such as
compilation, is part of its start. Measured on rank 0, whose waits for other ranks are part of its steps; a step in
which ranks stood still, and went on, counts what a step usually takes, and the rest as a hang.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from meshwright.log import logger
from meshwright.spec.frozen import Frozen
from meshwright.spec.run.done_steps import StepTime, read_step_times
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import EventKind, EventSpans, RunEvent, read_events
from meshwright.units import format_duration

_NUM_WARM_UP = 3
"""First steps of an attempt, which compile and allocate."""
_CLOCK_BACK_S: Final = 1.0
"""Steps of an attempt do not overlap; corrections below this do not show in goodput."""
_STILL_AT_LEAST_S: Final = 5.0
_STILL_STEPS: Final = 20.0
"""A step that took more than so many usual ones, by the median, and so many seconds, stood still for the rest."""


class Goodput(Frozen):
    """Where the time of a run went, in seconds; the parts add up to the whole."""

    productive_s: float = 0.0
    """In steps that count."""
    repeated_s: float = 0.0
    """In steps that a restart, a rollback or a failure cut off, most of which are done again."""
    skipped_s: float = 0.0
    """In steps whose update [guards] skipped: their data is used, and nothing is learned from it."""
    data_wait_s: float = 0.0
    """In steps that count, waiting for samples."""
    checkpoint_s: float = 0.0
    """Waiting for checkpoints: until they are written, or, in the background, staged."""
    validation_s: float = 0.0
    """Measuring validation losses."""
    start_up_s: float = 0.0
    """From the launch to the first step, and what the first steps take beyond later ones."""
    restart_s: float = 0.0
    """From the death of an attempt to the first step of the next, with those that died before one, and its warm-up;
    restores of rollbacks."""
    hang_s: float = 0.0
    """From the last progress of a rank until the run was ended for it; steps that went on, beyond a usual one."""
    stopped_s: float = 0.0
    """From the end of a launcher, or the last sign of the ranks of one that was killed, to the next launch."""
    other_s: float = 0.0
    """Between steps: agreement of the ranks, metrics, the end of the run."""

    @property
    def total_s(self) -> float:
        """Return the sum of the parts."""
        return float(sum(getattr(self, name) for name in type(self).model_fields))

    @property
    def share(self) -> float:
        """Return the share of the time that trained, 0 to 1."""
        return self.productive_s / self.total_s if self.total_s else 0.0


def read_goodput(run: Run) -> Goodput | None:
    """Return where the time of a run went; None for one whose metrics and events say no times.

    Warns of a system clock that went back meanwhile. One that went forward looks like a pause.
    """
    steps = read_step_times(run)
    for last, step in pairwise(steps):
        back_s = last.end_s - step.start_s
        if last.attempt == step.attempt and back_s > _CLOCK_BACK_S:
            logger.warning(
                "%s: the system clock went back by %s between steps %d and %d: goodput, whose times are of that clock, "
                "is wrong",
                *(run.folder, format_duration(back_s), last.step, step.step),
            )
    return goodput(steps, read_events(run))


def goodput(steps: Sequence[StepTime], events: Sequence[RunEvent] = ()) -> Goodput | None:
    """Return where the time of these steps, and of what lay between them, went; None where neither says a time.

    Without a step all until the first sign of a death is the start.
    """
    sweep = _Sweep(steps, events)
    if not steps:
        sweep.without_steps(events)
        found = Goodput(**sweep.parts)
        return found if found.total_s else None
    sweep.before_first()
    for last, step in zip((None, *steps), steps, strict=False):
        if last is not None:
            sweep.between(last, step)
        sweep.within(step)
    sweep.after_last()
    return Goodput(**sweep.parts)


class _Sweep:
    """The parts of a run, summed from its launch to its end."""

    def __init__(self, steps: Sequence[StepTime], events: Sequence[RunEvent]) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._steps = steps
        self._spans = {part: EventSpans(events, kind) for kind, part in _WAITS.items()}
        self._seen, self._moments = EventSpans(events, "last seen"), [one for one in events if one.kind in _LAUNCHER]
        self._last_s = max((one.time_s for one in events if one.kind != "started"), default=0.0)
        self._began_s = min((one.time_s for one in events if one.kind in ("launched", "started")), default=math.inf)
        self._counting = {id(step) for step in _counting(steps)}
        self._stood_s = self._standstills_s()
        self._warm_share = self._warm_shares()

    def before_first(self) -> None:
        """Add what came before the first step."""
        start_s = self._steps[0].start_s
        self._add_gap(min(self._began_s, start_s), start_s, "start_up_s")

    def within(self, step: StepTime) -> None:
        """Add one step."""
        work_s, stalled_s, stood_s = self._work_s(step), self._stalled_s(step), self._stood_s.get(id(step), 0.0)
        warm_s = work_s * self._warm_share.get(id(step), 0.0)
        self.parts["start_up_s" if step.attempt == self._steps[0].attempt else "restart_s"] += warm_s
        self.parts["checkpoint_s"] += stalled_s
        self.parts["hang_s"] += stood_s
        waited_s = step.step_s - stalled_s - stood_s - work_s
        if id(step) in self._counting and step.is_skipped:
            self.parts["skipped_s"] += work_s - warm_s + waited_s
        elif id(step) in self._counting:
            self.parts["productive_s"] += work_s - warm_s
            self.parts["data_wait_s"] += waited_s
        else:
            self.parts["repeated_s"] += work_s - warm_s + waited_s

    def between(self, last: StepTime, step: StepTime) -> None:
        """Add what lay between two steps."""
        if last.attempt == step.attempt:
            self._add_gap(last.end_s, step.start_s, "other_s")
            return
        died_s = self._death(last.end_s, step.start_s)
        self._add_gap(last.end_s, died_s, "repeated_s")
        while self._moments and self._moments[0].time_s < died_s:
            del self._moments[0]
        is_stopped = False
        while self._moments and self._moments[0].time_s <= step.start_s:
            moment = self._moments.pop(0)
            # A launcher that was killed has written no end: it was that of its ranks.
            is_stopped |= moment.kind == "launched"
            self._add_gap(died_s, moment.time_s, "stopped_s" if is_stopped else "restart_s")
            died_s, is_stopped = moment.time_s, moment.kind == "ended"
        self._add_gap(died_s, step.start_s, "stopped_s" if is_stopped else "restart_s")

    def without_steps(self, events: Iterable[RunEvent]) -> None:
        """Add the whole of a run in which no step was finished."""
        at_s, part = self._began_s, "start_up_s"
        for event in events:
            if event.time_s <= at_s or event.kind not in ("last seen", "hang", *_LAUNCHER):
                continue
            self._add_gap(at_s, event.time_s, "stopped_s" if event.kind == "launched" else part)
            at_s, part = event.time_s, "stopped_s" if event.kind == "ended" else "restart_s"
        if math.isfinite(at_s):
            self._add_gap(at_s, self._last_s, part)

    def after_last(self) -> None:
        """Add what came after the last step."""
        last_s = self._steps[-1].end_s
        self._add_gap(last_s, self._last_s, "other_s")

    def _death(self, after_s: float, before_s: float) -> float:
        """Return the last sign of life of an attempt whose last step ended at `after_s`."""
        signs = [*self._seen.within(after_s, before_s), *self._spans["hang_s"].within(after_s, before_s)]
        if signs:
            return min(start_s for start_s, _ in signs)
        # Of an attempt that was asked to stop, its last checkpoint.
        waits = (self._spans[part].within(after_s, before_s) for part in ("checkpoint_s", "validation_s"))
        return max((end_s for found in waits for _, end_s in found), default=after_s)

    def _add_gap(self, start_s: float, end_s: float, rest: str) -> None:
        """Add the time between two moments: to the parts of the events in it, else to `rest`."""
        left_s = max(0.0, end_s - start_s)
        for part, spans in self._spans.items() if left_s else ():
            covered_s = min(left_s, spans.covered_s(start_s, end_s))
            self.parts[part] += covered_s
            left_s -= covered_s
        self.parts[rest] += left_s

    def _stalled_s(self, step: StepTime) -> float:
        return min(step.step_s, self._spans["checkpoint_s"].covered_s(step.start_s, step.end_s))

    def _work_s(self, step: StepTime) -> float:
        return self._busy_s(step) - self._stood_s.get(id(step), 0.0)

    def _busy_s(self, step: StepTime) -> float:
        """Return the time of a step that is neither a wait for data nor for a checkpoint."""
        return max(0.0, step.step_s - step.data_wait_s - self._stalled_s(step))

    def _standstills_s(self) -> dict[int, float]:
        """Return, by id, the seconds of steps in which ranks stood still: those recorded, or all beyond a usual step.

        The latter of steps that took as many usual ones as run.hang_limit_s = "auto", but for an attempt's first.
        """
        found: dict[int, float] = {}
        num_done: dict[int, int] = defaultdict(int)
        usual_s = statistics.median(map(self._busy_s, self._steps)) if self._steps else 0.0
        for step in self._steps:
            num_done[step.attempt] += 1
            busy_s, stood_s = self._busy_s(step), self._spans["hang_s"].covered_s(step.start_s, step.end_s)
            if num_done[step.attempt] > _NUM_WARM_UP and busy_s > max(_STILL_AT_LEAST_S, _STILL_STEPS * usual_s):
                stood_s = max(stood_s, busy_s - usual_s)
            if stood_s:
                found[id(step)] = min(stood_s, busy_s)
        return found

    def _warm_shares(self) -> dict[int, float]:
        """Return, by id, the share of the work of each attempt's first steps that later ones do not take."""
        later_s: list[float] = []
        first: dict[int, list[StepTime]] = defaultdict(list)
        for step in self._steps:
            if len(first[step.attempt]) < _NUM_WARM_UP:
                first[step.attempt].append(step)
            else:
                later_s.append(self._work_s(step))
        if not later_s:
            return {}
        mean_s, shares = sum(later_s) / len(later_s), {}
        for steps in first.values():
            work_s = sum(map(self._work_s, steps))
            # Of all together: that one of them is slow by chance is no warm-up.
            share = max(0.0, 1 - mean_s * len(steps) / work_s) if work_s else 0.0
            shares.update({id(step): share for step in steps})
        return shares


_WAITS: dict[EventKind, str] = {
    "checkpoint": "checkpoint_s",
    "validation": "validation_s",
    "restore": "restart_s",
    "hang": "hang_s",
}
"""Events with a duration, and the part that each belongs to."""
_LAUNCHER: tuple[EventKind, ...] = ("launched", "ended")


def _counting(steps: Sequence[StepTime]) -> list[StepTime]:
    """Return the steps that no return to an earlier one cut off."""
    kept: list[StepTime] = []
    for step in steps:
        while kept and kept[-1].step >= step.step:
            kept.pop()
        if not step.is_rolled_back:
            kept.append(step)
    return kept
