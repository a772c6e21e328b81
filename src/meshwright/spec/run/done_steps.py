"""StepTime: when each step of a run was done, and what of it was a wait for data, from metrics.jsonl."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

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
    is_skipped: bool = False
    """Whether [guards] skipped its update."""
    is_rolled_back: bool = False
    """Whether the run returned to an earlier step after it."""

    @property
    def start_s(self) -> float:
        """Return when it began, in seconds since 1970."""
        return self.end_s - self.step_s


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
            decision = row.get("decision", "take")  # of older runs it is not known
            yield StepTime(
                int(row["step"]),
                int(row["attempt"]),
                row["time_s"],
                row["step_ms"] / 1e3,
                row["data_wait_ms"] / 1e3,
                decision != "take",
                decision == "roll back",
            )
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
            continue  # a validation's row, or one that a killed rank has not ended
