"""RunMetrics and RunReport: what a run wrote of its steps, and next to a prediction."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.finding import RankFinding
from meshwright.spec.run.goodput import Goodput
from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.run.run import Attempt, Manifest, Run
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_waterfall import Waterfall

Floats = NDArray[np.float64]

_NUM_WARM_UP = 3
"""First steps of an attempt, which compile and allocate."""
LEAST_STEPS = 2 * _NUM_WARM_UP
"""Steps of an attempt from which a step time is taken."""
_WHOLE = ("step", "attempt")
_FIELDS = (
    *_WHOLE,
    *("loss", "grad_norm", "learning_rate", "tokens_per_s", "step_ms", "data_wait_ms", "memory_bytes"),
    "validation_loss",
)
"""What is read of a row; others are left to their readers."""


def num_warm_up(num_steps: int) -> int:
    """Return how many first steps of an attempt are left out of its step time: none where too few would be left."""
    return _NUM_WARM_UP if num_steps >= LEAST_STEPS else 0


@dataclass(frozen=True)
class RunMetrics:
    """One element a training step, oldest first, without those that a resume or a rollback cut off."""

    step: NDArray[np.int64]
    loss: Floats
    grad_norm: Floats
    learning_rate: Floats
    tokens_per_s: Floats
    step_s: Floats
    data_wait_s: Floats
    """What a step waited for its samples, part of step_s; nan where it was not recorded."""
    memory_bytes: Floats
    """Of the fullest rank."""
    is_skipped: NDArray[np.bool_]
    """Whether [guards] skipped the step's update."""
    attempt: NDArray[np.int64]
    """Start of the ranks that the step belongs to, from 1."""
    validation_step: NDArray[np.int64]
    validation_loss: Floats
    num_skips_cut_off: int = 0
    """Updates that [guards] skipped in steps that were cut off, and are no element."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steps_not_finite(self) -> NDArray[np.int64]:
        """Return the steps whose loss was recorded as nan or infinite."""
        return self.step[~np.isfinite(self.loss)]

    @property
    def steps_skipped(self) -> NDArray[np.int64]:
        """Return the steps whose update was skipped, but for those that were cut off."""
        return self.step[self.is_skipped]

    @property
    def timed_attempt(self) -> int:
        """Return the newest attempt that has enough steps to be timed; the newest of all, if none has."""
        attempts, counts = np.unique(self.attempt, return_counts=True)
        return int(max(attempts[counts >= LEAST_STEPS], default=attempts[-1]))

    @property
    def is_timed(self) -> bool:
        """Return whether that attempt has enough steps, so that the first of them, which warm up, are left out."""
        return len(self) > 0 and int((self.attempt == self.timed_attempt).sum()) >= LEAST_STEPS

    @property
    def timed(self) -> NDArray[np.int64]:
        """Return the positions of the steps that medians are taken over: the timed attempt's without its first few."""
        rows = np.flatnonzero(self.attempt == self.timed_attempt)
        return rows[num_warm_up(len(rows)) :]

    def timed_without(self, profiled: Collection[int]) -> NDArray[np.int64]:
        """Return those positions without profiled steps, which take longer; with them where none else is left."""
        rows = self.timed[~np.isin(self.step[self.timed], list(profiled))]
        return rows if len(rows) else self.timed

    def words_of(self, rows: NDArray[np.int64]) -> str:
        """Return the numbers of the steps at `rows`, such as "steps 24 to 40", and their attempt if not the newest."""
        first, last = self.step[rows[0]], self.step[rows[-1]]
        words, attempt = f"step {first}" if first == last else f"steps {first} to {last}", self.attempt[rows[0]]
        return words if attempt == self.attempt.max() else f"{words} of attempt {attempt}"


_NOT_FINITE = "not_finite"
"""Key of a row: the text of each of its numbers that is nan or infinite, by name."""


def row_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of metrics.jsonl: null for nan and infinity, which `not_finite` names."""
    texts = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    nulls = dict.fromkeys(texts)
    return json.dumps({**row, **nulls, **({_NOT_FINITE: texts} if texts else {})}, allow_nan=False) + "\n"


def row_of(line: str) -> Any:
    """Return what `row_line` was given; of an older run, whose lines have NaN and Infinity, too."""
    row = json.loads(line)
    texts = row.pop(_NOT_FINITE, None) if isinstance(row, dict) else None
    return {**row, **{name: float(text) for name, text in texts.items()}} if isinstance(texts, dict) else row


def was_skipped(row: Mapping[str, Any]) -> bool:
    """Return whether [guards] skipped the update of the step of a row."""
    return str(row.get("decision", "take")) != "take"


def was_rolled_back(row: Mapping[str, Any]) -> bool:
    """Return whether the run returned to an earlier step after that of a row."""
    return row.get("decision") == "roll back"


def read_metrics(run: Run) -> RunMetrics:
    """Return the metrics of `run`; raises ConfigError, which names the line, where they cannot be read."""
    try:
        *lines, unended = run.metrics.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"{run.metrics} cannot be read ({error.strerror}): put it back, or name a run that has trained"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{run.metrics} cannot be read as metrics: {error.reason} at byte {error.start}: restore it from a copy, "
            "or name another run folder"
        ) from None
    if unended:
        logger.warning("%s: its last line is incomplete and left out", run.metrics)
    return _columns([_row(run, number, line) for number, line in enumerate(lines, start=1) if line.strip()])


def _row(run: Run, number: int, line: str) -> dict[str, Any]:
    """Return one line's row, whose fields are numbers; raises ConfigError for another."""
    try:
        row: dict[str, Any] = row_of(line)
        _require_numbers(row)
        return row
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at column {error.colno}"
    except (ValueError, TypeError) as error:
        fault = str(error)
    raise ConfigError(
        f"{run.metrics}, line {number}, cannot be read as metrics: {fault}: delete that line, or restore the file "
        "from a copy"
    )


def _require_numbers(row: Any) -> None:
    """Raise ValueError or TypeError unless `row` is one of metrics: of a step, of a validation, or of neither."""
    if not isinstance(row, dict):
        raise TypeError("it is no object, as rows are")
    needed = [name for name in ("step_ms", "validation_loss") if name in row]
    for name in (*(("step",) if needed else ()), *needed):
        if row.get(name) is None:
            raise ValueError(f'"{name}" is missing')
    for name in _FIELDS:
        if row.get(name) is not None:
            try:
                (int if name in _WHOLE else float)(row[name])
            except (ValueError, TypeError, OverflowError):
                raise ValueError(f'"{name}" is {json.dumps(row[name])[:40]}, no number') from None
    if "step_ms" in row and not np.isfinite(float(row["step_ms"])):
        raise ValueError(f'"step_ms" is {row["step_ms"]}')


def _columns(rows: list[dict[str, Any]]) -> RunMetrics:
    kept = _kept(rows)
    steps = {int(row["step"]): row for row in kept if "step_ms" in row}
    validated = {int(row["step"]): row for row in kept if "validation_loss" in row}
    is_skipped = np.array([was_skipped(row) for row in steps.values()], np.bool_)

    def floats(name: str) -> Floats:
        return np.array([np.nan if row.get(name) is None else float(row[name]) for row in steps.values()], np.float64)

    return RunMetrics(
        step=np.array(list(steps), np.int64),
        loss=floats("loss"),
        grad_norm=floats("grad_norm"),
        learning_rate=floats("learning_rate"),
        tokens_per_s=floats("tokens_per_s"),
        step_s=floats("step_ms") / 1000,
        data_wait_s=floats("data_wait_ms") / 1000,
        memory_bytes=floats("memory_bytes"),
        is_skipped=is_skipped,
        attempt=np.array([int(row.get("attempt", 1)) for row in steps.values()], np.int64),
        validation_step=np.array(list(validated), np.int64),
        validation_loss=np.array([float(row["validation_loss"]) for row in validated.values()], np.float64),
        num_skips_cut_off=sum(map(was_skipped, rows)) - int(is_skipped.sum()),
    )


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of steps and validations that no later return to an earlier step has cut off."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if "step_ms" in row:
            while kept and int(kept[-1]["step"]) >= int(row["step"]):
                kept.pop()
        elif "validation_loss" not in row:
            continue
        if not was_rolled_back(row):
            kept.append(row)
    return kept


def attempt_metrics(first_step: int, step_s: Floats, attempt: int) -> RunMetrics:
    """Return the metrics of consecutive steps of one attempt, of which only the time is known."""
    unknown = np.full(len(step_s), np.nan)
    return RunMetrics(
        step=np.arange(first_step, first_step + len(step_s)),
        loss=unknown,
        grad_norm=unknown,
        learning_rate=unknown,
        tokens_per_s=unknown,
        step_s=step_s,
        data_wait_s=unknown,
        memory_bytes=unknown,
        is_skipped=np.zeros(len(step_s), np.bool_),
        attempt=np.full(len(step_s), attempt),
        validation_step=np.array([], np.int64),
        validation_loss=np.array([], np.float64),
    )


def timed_rows(metrics: RunMetrics, job: Job) -> NDArray[np.int64]:
    """Return the positions of the steps that medians of a run of `job` are taken over, without its profiled ones."""
    start = job.run.profile_start
    return metrics.timed_without(range(start, start + job.run.profile_steps) if start is not None else ())


def timed_attempt_of(manifest: Manifest, metrics: RunMetrics) -> Attempt:
    """Return the attempt whose steps the medians of a run with at least one finished step are of."""
    return manifest.attempts[metrics.timed_attempt - 1]


def untimed_layout(manifest: Manifest, metrics: RunMetrics) -> Layout | None:
    """Return the layout of the newest attempt where the medians are of an earlier one in another; None where not."""
    newest = manifest.attempts[-1].layout
    return None if newest == timed_attempt_of(manifest, metrics).layout else newest


@dataclass(frozen=True)
class RunReport:
    """What a run measured, and what formulas, a simulation or a profile say of its step."""

    folder: Path
    manifest: Manifest
    metrics: RunMetrics
    predicted: Candidate | None
    """The layout that the run took, with its predicted step and memory; None for a model of the user's own."""
    measured_s: float
    """Median of the timed steps."""
    parts: Mapping[str, StepDecomposition]
    """The step by component: "predicted" by formula, "simulated" and "measured" where they exist."""
    waterfall: Waterfall
    """The step by cause, from the floor to what was measured."""
    example: str | None = None
    """The machine whose rates the prediction takes, where the one that ran is not calibrated."""
    goodput: Goodput | None = None
    """Where the time of the whole run went; None for a run whose metrics say no times."""
    findings: tuple[RankFinding, ...] = ()
    """Ranks that were slower than others, and wrong numbers that were found, oldest first."""

    @property
    def layout(self) -> Layout:
        """Return the layout of the timed attempt."""
        return timed_attempt_of(self.manifest, self.metrics).layout

    @property
    def untimed_layout(self) -> Layout | None:
        """Return the layout of the newest attempt where it did too few steps to be timed, in another than `layout`."""
        return untimed_layout(self.manifest, self.metrics)

    @property
    def predicted_s(self) -> float | None:
        """Return the predicted step time; None where there is no prediction."""
        return None if self.predicted is None else self.predicted.step_s
