"""Rank 0's record of a run: log lines, progress bar, metrics, manifest. Other ranks have none."""

import logging
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from meshwright.data.questions.question_set import Mean
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.lost_peer import exit_code_of
from meshwright.log import log_level, logger, shows_progress, warning_if_unwritten
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import EventKind, append_event
from meshwright.spec.run.run_report import RunMetrics, attempt_metrics, read_metrics, timed_rows
from meshwright.trainer.run.run_folder import ManifestFile
from meshwright.trainer.run.sinks import open_sinks
from meshwright.units import format_bytes, format_count, format_duration

# The remaining time is estimated from the latest steps, since the first ones of an attempt are slower.
_RECENT_STEPS = 20
_LEAST_DATA_SHARE = 0.01
_LINE_COLUMNS = 100
_LEFT_OUT_FIRST = ("eta", "lr", "mem", "skew")


@dataclass(frozen=True)
class StepMetrics:
    """One row of metrics.jsonl; memory is rank 0's peak, rates are over all ranks."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples_per_s: float
    tokens_per_s: float | None
    step_ms: float
    data_wait_ms: float
    memory_bytes: int
    mfu: float | None
    attempt: int
    time_s: float = field(default_factory=time.time)
    """When the step was done, in seconds since 1970."""
    summed_bytes: int | None = None
    """Bytes that a rank has summed over independent replicas in the step; None, and no column, without them."""
    decision: str = "take"
    """What [guards] made of the step: "skip", or "roll back" for the last one skipped before a rollback; no column of
    a step that was taken."""
    experts: dict[str, float] = field(default_factory=dict)
    """Further columns of the row, from ExpertLoad; empty without experts."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """Further columns of the row: token accuracy with train.task = "sft", rewards of the step's pairs with "dpo"."""
    sources: dict[str, float] = field(default_factory=dict)
    """Further columns of the row: what the run has read of each source of a mixture up to and with the step."""

    def row(self) -> dict[str, Any]:
        """Return the row as plain values; None for an unknown MFU and for data without tokens."""
        row = asdict(self)
        further = [row.pop(name) for name in ("experts", "loss_metrics", "sources")]
        if self.summed_bytes is None:
            del row["summed_bytes"]
        if self.decision == "take":
            del row["decision"]
        return row | dict(item for columns in further for item in columns.items())

    def line(self, num_steps: int, left_s: float) -> str:
        """Return the log line, in at most 100 columns: what does not fit is left out, the estimated time first.

        Data waits below 1 % are omitted.
        """
        speed = f"{format_count(self.samples_per_s)} samples/s"
        if self.tokens_per_s is not None:
            speed = f"{format_count(self.tokens_per_s)} tok/s"
        waits = self.data_wait_ms > _LEAST_DATA_SHARE * self.step_ms
        parts = {
            "step": f"step {self.step}/{num_steps}",
            "loss": f"loss {self.loss:.4f}",
            "loss_metrics": loss_metrics_text(self.loss_metrics),
            "gnorm": f"gnorm {self.grad_norm:.3f}",
            "lr": f"lr {self.learning_rate:.1e}",
            "skew": f"skew {self.experts['router_skew']:.2f}" if self.experts else "",
            "speed": speed,
            "time": f"{self.step_ms:.0f} ms",
            "data": f"data {self.data_wait_ms:.0f} ms" if waits else "",
            "mem": f"mem {format_bytes(self.memory_bytes)}",
            "mfu": "" if self.mfu is None else f"MFU {self.mfu:.1%}",
            "eta": f"eta {timedelta(seconds=round(left_s))}",
        }
        for name in ("", *_LEFT_OUT_FIRST):
            parts.pop(name, None)
            line = "  ".join(filter(None, parts.values()))
            if len(line) <= _LINE_COLUMNS:
                break
        return line


def loss_metrics_text(metrics: dict[str, float]) -> str:
    """Return the accuracy of tokens, or accuracy and margin of pairs, for a log line; "" without any."""
    if "token_accuracy" in metrics:
        return f"accuracy {metrics['token_accuracy']:.3f}"
    return f"accuracy {metrics['rewards/accuracy']:.2f}  margin {metrics['rewards/margin']:.3f}" if metrics else ""


class ConsoleHandler(logging.Handler):
    """Handler that prints log records above the progress bar, never wrapped."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._console.print(self.format(record), soft_wrap=True, markup=False, highlight=False)


class LogFile(logging.FileHandler):
    """Log of a rank: it ends where a full disk does not take a line, with one warning."""

    _is_cut_off = False

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        if not self._is_cut_off:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn of an error of the disk; the default prints a traceback for every line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self._is_cut_off = True
        logger.warning("%s ends here: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file, whose last line may still be held back."""
        with suppress(OSError):
            super().close()


class RunRecorder:
    """Writer of each step's metrics to all sinks of the job."""

    def __init__(self, job: Job, run: Run, manifest: ManifestFile) -> None:
        self._job, self._run, self._manifest = job, run, manifest
        self._sinks = open_sinks(run, job)
        self._step_ms: list[float] = []
        self._losses: dict[str, float] = {}
        self._accuracies: dict[str, float] = {}
        console = Console()
        self._handlers: list[logging.Handler] = [ConsoleHandler(console), _file_handler(run)]
        self._handlers[0].setLevel(log_level())
        is_hidden = not (console.is_terminal and shows_progress())
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, console=console, disable=is_hidden, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
        for handler in self._handlers:
            logger.addHandler(handler)
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with warning_if_unwritten(self._run.manifest):
                self._manifest.close(exit_code_of(error))
        self._progress.stop()
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        for sink in self._sinks:
            with nullcontext() if error is None else warning_if_unwritten(self._run.metrics):
                sink.close()

    @property
    def attempt(self) -> int:
        """Return the number of this attempt at the run, 1 for the first."""
        return self._manifest.attempt

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        self._step_ms.append(metrics.step_ms)
        self._losses["last_loss"] = metrics.loss
        if metrics.step == 1:
            self._manifest.add_results(first_loss=metrics.loss)
        for sink in self._sinks:
            sink.write(metrics.step, metrics.row())
        num_steps = self._job.train.steps
        if self._task is None:
            self._task = self._progress.add_task("training", total=num_steps)
        self._progress.update(self._task, completed=metrics.step)
        if metrics.step % self._job.run.log_interval == 0 or metrics.step == num_steps:
            left_s = (num_steps - metrics.step) * statistics.median(self._step_ms[-_RECENT_STEPS:]) / 1e3
            logger.info("%s", metrics.line(num_steps, left_s))

    def validation(self, step: int, loss: float, loss_metrics: dict[str, float]) -> None:
        """Record a validation loss, and what the loss counted besides."""
        self._losses["validation_loss"] = loss
        columns = {f"validation_{name}": value for name, value in loss_metrics.items()}
        for sink in self._sinks:
            sink.write(step, {"step": step, "validation_loss": loss, "attempt": self.attempt, **columns})
        more = f"  {loss_metrics_text(loss_metrics)}" if loss_metrics else ""
        logger.info("step %d/%d | validation loss %.4f%s", step, self._job.train.steps, loss, more)

    def evaluation(self, step: int, accuracies: Mapping[str, Mean]) -> None:
        """Record the accuracy on questions."""
        values = {name: mean.value for name, mean in accuracies.items()}
        for sink in self._sinks:
            sink.write(step, {"step": step, **values, "attempt": self.attempt})
        self._accuracies = values
        error = accuracies["acc"].standard_error
        words = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger.info("step %d/%d | %s (standard error %.4f)", step, self._job.train.steps, words, error)

    def event(self, kind: EventKind, step: int, duration_s: float) -> None:
        """Record that training has waited so long, up to now, for something after `step`."""
        append_event(self._run, kind, duration_s=duration_s, step=step)

    def add_results(self, **results: Any) -> None:
        """Write results to the manifest before the end, such as the state of uploads."""
        self._manifest.add_results(**results)

    def finish(self, last_step: int, exit_code: int, **results: Any) -> None:
        """Write the results and the exit code of the attempt to the manifest, and log a summary."""
        speed = self._run_speed(last_step)
        self._manifest.add_results(last_step=last_step, **self._losses, **self._accuracies, **speed, **results)
        timed = f" | {self._attempt_words(last_step)}" if self._step_ms else ""
        total = f"{format_duration(sum(self._step_ms) / 1e3)} in steps" if self._step_ms else "no step in this attempt"
        loss = f" | loss {self._losses['last_loss']:.4f}" if self._losses else ""
        hashed = f" | parameters {results['parameter_hash']}" if results.get("parameter_hash") else ""
        num_steps = self._job.train.steps
        # A run that is resumed with fewer steps than it has done trains none.
        at = f"step {last_step}/{num_steps}" if last_step <= num_steps else f"step {last_step}"
        logger.info("%s%s%s | %s%s", at, loss, timed, total, hashed)
        if last_step < self._job.train.steps:
            is_asked = last_step == self._job.train.stop_after
            key = " train.stop_after=none" if is_asked else ""
            logger.info("stopped with %d steps to go: continue with --resume%s", self._job.train.steps - last_step, key)
        self._manifest.close(exit_code)

    def _run_speed(self, last_step: int) -> dict[str, Any]:
        """Return median and 95th percentile of the run's timed steps, and which steps these are; empty without any.

        They are those of `report` and `compare`: an attempt of few steps, which warm up, leaves an earlier one's.
        """
        if not self._step_ms:
            return {}
        metrics = self._attempt_metrics(last_step)
        try:
            # A long file takes seconds to read, and after a signal there may be few.
            return _speed(metrics if metrics.is_timed else read_metrics(self._run), self._job)
        except ConfigError as error:  # what was trained is not less done
            logger.warning("the median step is unknown: %s", error)
            return {}

    def _attempt_words(self, last_step: int) -> str:
        """Return the step time of this attempt, by all of its steps where they are few."""
        metrics = self._attempt_metrics(last_step)
        speed, few = _speed(metrics, self._job), "" if metrics.is_timed else ", warm-up included"
        median_ms, p95_ms = speed["median_step_ms"], speed["p95_step_ms"]
        return f"{speed['timed_steps']}: median {median_ms:.0f} ms, p95 {p95_ms:.0f} ms{few}"

    def _attempt_metrics(self, last_step: int) -> RunMetrics:
        return attempt_metrics(last_step - len(self._step_ms) + 1, np.array(self._step_ms) / 1e3, self.attempt)


def _speed(metrics: RunMetrics, job: Job) -> dict[str, Any]:
    rows = timed_rows(metrics, job)
    ordered = sorted((1000 * metrics.step_s[rows]).tolist())
    return {
        "median_step_ms": statistics.median(ordered),
        "p95_step_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "timed_steps": metrics.words_of(rows),
    }


def _file_handler(run: Run) -> logging.Handler:
    handler = LogFile(run.rank_log(0))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    return handler
