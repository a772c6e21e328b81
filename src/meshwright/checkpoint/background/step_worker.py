"""StepWorker: a process that uploads or exports checkpoints one by one, with retries, while training continues."""

import json
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from meshwright.checkpoint.background.helper_process import command_of
from meshwright.spec.run.run import Run

_MAX_DELAY_S = 300.0
_LAST_ATTEMPTS = 4
"""Attempts at each checkpoint once training has ended."""


class StepEnd(NamedTuple):
    """How one attempt at a checkpoint ended."""

    step: int
    error: str | None
    """None where it is done."""
    num_bytes: int
    """Bytes that were sent or written."""
    duration_s: float


class StepWorker:
    """The uploads or exports of a run, one at a time, the newest checkpoint first; on one rank."""

    def __init__(
        self,
        run: Run,
        module: str,
        options: dict[str, Any],
        pending: Collection[int],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`module` works in a helper process, with the run and `options`, and answers each step with a StepEnd.

        `pending` are the steps that an earlier attempt of the run did not do.
        """
        self._run, self._now_s = run, now_s
        self._command = command_of(module, {"run": str(run.folder.absolute()), **options})
        self._answers: queue.Queue[StepEnd | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._pending = set(pending)
        self._current: int | None = None
        self._num_failures, self._due_s = 0, 0.0
        self.newest: int | None = None
        self.num_failed = 0
        self.last_error: str | None = None

    @property
    def in_use(self) -> list[int]:
        """Return the step that is being read, which must not be removed."""
        return [] if self._current is None else [self._current]

    @property
    def pid(self) -> int | None:
        """Return the process id of the worker; None before its first step."""
        return None if self._process is None else self._process.pid

    def add(self, step: int) -> None:
        """Take the committed checkpoint after `step` when its turn comes."""
        self._pending.add(step)

    def poll(self) -> list[StepEnd]:
        """Return the attempts that ended since the last call, and start the next; does not wait."""
        ended = []
        try:
            while self._current is not None:
                ended.append(self._take(self._answers.get_nowait()))
        except queue.Empty:
            pass
        self._start_next()
        return ended

    def drain(self, timeout_s: float = math.inf) -> list[StepEnd]:
        """Wait until all is done, the newest has failed several times, or time is over; return how attempts ended."""
        end_s = self._now_s() + timeout_s
        self._num_failures, self._due_s = 0, 0.0
        ended = self.poll()
        while (self._pending or self._current is not None) and self._num_failures < _LAST_ATTEMPTS:
            left_s = end_s - self._now_s()
            if left_s <= 0:
                break
            if self._current is None:
                time.sleep(min(0.05, left_s, max(0.0, self._due_s - self._now_s())))
                self._start_next()
                continue
            with suppress(queue.Empty):
                ended.append(self._take(self._answers.get(timeout=min(left_s, 3600.0))))
        return ended

    def results(self) -> dict[str, Any]:
        """Return what the manifest says of this work."""
        return {
            "newest_step": self.newest,
            "waiting_steps": sorted({*self._pending, *self.in_use}),
            "num_failed": self.num_failed,
            "last_error": self.last_error,
        }

    def close(self) -> None:
        """End the process; what it had not done is done when the run is resumed."""
        process, self._process = self._process, None
        if process is not None:
            if self._current is not None:
                process.kill()
            with suppress(BrokenPipeError), process.stdin or nullcontext():
                pass  # closed: the process ends
            process.wait()

    def _start_next(self) -> None:
        existing = set(self._run.checkpoint_steps())
        self._pending &= existing
        if self._current is not None or not self._pending or self._now_s() < self._due_s:
            return
        self._current = max(self._pending)
        self._pending.discard(self._current)
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            threading.Thread(target=_read_answers, args=(self._process, self._answers), daemon=True).start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._current}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process ended; its last answer says so

    def _take(self, answer: StepEnd | None) -> StepEnd:
        step, self._current = self._current, None
        assert step is not None
        if answer is None:
            assert self._process is not None
            with suppress(BrokenPipeError), self._process.stdin or nullcontext():
                code = self._process.wait()
            self._process = None
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            answer = StepEnd(step, f"its process {how}", 0, 0.0)
        if answer.error is None:
            self._num_failures, self._due_s, self.last_error = 0, 0.0, None
            self.newest = max(step, self.newest or 0)
        else:
            self._pending.add(step)
            self.num_failed, self.last_error = self.num_failed + 1, answer.error
            self._due_s = self._now_s() + min(2.0**self._num_failures, _MAX_DELAY_S)
            self._num_failures += 1
        return answer


def _read_answers(process: subprocess.Popen[str], answers: queue.Queue[StepEnd | None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(StepEnd(**json.loads(line)))
    answers.put(None)
