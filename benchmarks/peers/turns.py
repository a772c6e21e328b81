"""Turns: the side of a measured rank. All ways' ranks live at the same time, and one way at a time takes a step.

A turn is a whole iteration of a program's own training loop: data, step, logging and whatever else it does before its
next step. Only the standard library is imported: every environment has it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

ORDERS, ANSWERS = "PEERS_ORDERS", "PEERS_ANSWERS"
"""Environment variables with the file descriptors from which orders are read, and to which answers are written."""


class Number(Protocol):
    """A float, or a tensor of one element."""

    def __float__(self) -> float:
        """Return the value."""

    def __add__(self, other: Any, /) -> Any:
        """Return the sum."""


class Turns:
    """Called by a rank's training loop: `next` before each step, `loss` set within."""

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self._orders, self._answers = orders, answers
        self._started: tuple[float, ...] | None = None
        self.loss: Number = float("nan")
        """Of the step under way, of this rank or of all; a tensor is read when the turn ends."""

    @classmethod
    def of_environment(cls) -> Turns:
        """Return the turns that the process that started this one hands out."""
        return cls(os.fdopen(int(os.environ[ORDERS]), "r"), os.fdopen(int(os.environ[ANSWERS]), "w"))

    def next(self) -> None:
        """End the turn under way, if any, and wait for the next one; ends the process when there is none."""
        if self._started is not None:
            _wait_for_device()
            wall_s, cpu_s, system_s = (now - then for now, then in zip(_clocks(), self._started, strict=True))
            self._answer(wall_s=wall_s, cpu_s=cpu_s, system_s=system_s, loss=float(self.loss), peak_bytes=_peak_bytes())
        else:
            self._answer(ready=True)
        if not self._orders.readline():
            # Nothing that a rank holds is worth a tidy end, which would cost seconds.
            os._exit(0)
        self._started = _clocks()

    def _answer(self, **values: Any) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


def _clocks() -> tuple[float, ...]:
    """Return seconds of wall time, of this process's CPU time in all threads, and of that the operating system's."""
    return time.perf_counter(), time.process_time(), os.times().system


def _cuda() -> Any:
    """Return torch.cuda where the program uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _wait_for_device() -> None:
    if (cuda := _cuda()) is not None:
        cuda.synchronize()


def _peak_bytes() -> int:
    """Return the most that was allocated on the device; without one, the largest resident memory."""
    if (cuda := _cuda()) is not None:
        return int(cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_task(folder: Path) -> dict[str, Any]:
    """Return the task that `prepare` has written."""
    task: dict[str, Any] = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    return task
