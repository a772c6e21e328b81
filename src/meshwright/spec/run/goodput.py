"""Goodput: which share of a run's time went into steps that count.

    goodput = (time in steps that count - their waits for data) / (time from the first step's start on)

Ignored: what came before the first step, such as the start of the first attempt.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.spec.frozen import Frozen
from meshwright.spec.run.run import Run


@dataclass(frozen=True)
class StepTime:
    """When a step was done."""

    step: int
    attempt: int
    end_s: float
    """In seconds since 1970."""
    step_s: float
    data_wait_s: float


class Goodput(Frozen):
    """Where the time of a run went, in seconds; the parts add up to the whole."""

    productive_s: float
    """In steps that count."""
    repeated_s: float
    """In steps that a restart or a rollback did again."""
    data_wait_s: float
    """In steps that count, waiting for samples."""
    between_steps_s: float
    """Between steps of an attempt: checkpoints, validation, what ranks agree on."""
    between_attempts_s: float
    """From the last step of an attempt to the first of the next: until it was ended, its start and its restore."""

    @property
    def total_s(self) -> float:
        """Return the sum of the parts."""
        in_attempts_s = self.productive_s + self.repeated_s + self.data_wait_s + self.between_steps_s
        return in_attempts_s + self.between_attempts_s

    @property
    def share(self) -> float:
        """Return the share of the time that trained, 0 to 1."""
        return self.productive_s / self.total_s


def read_step_times(run: Run) -> list[StepTime]:
    """Return every step that was done, oldest first; empty for a run whose metrics say no times."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(_step_times(lines))


def _step_times(lines: Iterable[str]) -> Iterable[StepTime]:
    for line in lines:
        try:
            row = json.loads(line)
            yield StepTime(
                int(row["step"]), int(row["attempt"]), row["time_s"], row["step_ms"] / 1e3, row["data_wait_ms"] / 1e3
            )
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # a validation's row, or one that a killed rank has not ended


def goodput(steps: Sequence[StepTime]) -> Goodput | None:
    """Return where the time of these steps went; None for none."""
    if not steps:
        return None
    counting: list[StepTime] = []
    between = {True: 0.0, False: 0.0}
    for last, step in zip((None, *steps), steps, strict=False):
        if last is not None:
            between[last.attempt == step.attempt] += max(0.0, step.end_s - step.step_s - last.end_s)
        while counting and counting[-1].step >= step.step:
            counting.pop()
        counting.append(step)
    counted_s, waited_s = sum(one.step_s for one in counting), sum(one.data_wait_s for one in counting)
    return Goodput(
        productive_s=counted_s - waited_s,
        repeated_s=sum(one.step_s for one in steps) - counted_s,
        data_wait_s=waited_s,
        between_steps_s=between[True],
        between_attempts_s=between[False],
    )
