"""Sinks of metrics: JSONL always, TensorBoard and Weights & Biases on request."""

import os
import uuid
from pathlib import Path
from typing import Any, Protocol

from meshwright.extras import import_extra
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_report import row_line

_LONGEST_ROW_BYTES = 2**16


class Sink(Protocol):
    """Destination of rows of named numbers."""

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Record `row` of `step`."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """metrics.jsonl: one row per line, flushed at once; a resumed run appends with the next `attempt`."""

    def __init__(self, run: Run) -> None:
        _truncate_last_row(run.metrics)
        self._file = run.metrics.open("a", encoding="utf-8")

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Append `row`."""
        self._file.write(row_line(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, run: Run) -> None:
        module = import_extra("torch.utils.tensorboard", "run.tensorboard = true")
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Add every number of `row` as a scalar."""
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder; a resumed run continues it."""

    def __init__(self, run: Run, job: Job) -> None:
        module = import_extra("wandb", "run.wandb = true")
        self._run = module.init(
            project="meshwright",
            name=run.folder.name,
            dir=str(run.folder),
            config=job.to_dict(),
            id=_wandb_id(run),
            resume="allow",
        )

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Log every known value of `row`."""
        self._run.log({name: value for name, value in row.items() if value is not None}, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def _wandb_id(run: Run) -> str:
    """Return the run folder's W&B id, drawn at its first attempt, so that later attempts continue the same W&B run."""
    path = run.folder / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def _truncate_last_row(path: Path) -> None:
    """Remove an incomplete last row, left by a kill or a full disk, to which the next row would be appended."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_ROW_BYTES)
        file.seek(start)
        complete, newline, last = file.read().rpartition(b"\n")
        if last.endswith(b"}"):
            file.write(b"\n")
        else:
            file.truncate(start + len(complete) + len(newline))


def open_sinks(run: Run, job: Job) -> list[Sink]:
    """Return the sinks of `job`; raises UnsupportedError that names the extra of a missing package."""
    sinks: list[Sink] = [JsonLines(run)]
    if job.run.tensorboard:
        sinks.append(TensorBoard(run))
    if job.run.wandb:
        sinks.append(WeightsAndBiases(run, job))
    return sinks
