"""Stop request by a signal: honoured by a rank after the current step, passed on by a launcher."""

import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from meshwright.errors import MeshwrightError
from meshwright.spec.job.user_object import place_of

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Context manager that records the first SIGTERM, SIGHUP or SIGINT; a second SIGINT interrupts at once.

    Raises MeshwrightError for a KeyboardInterrupt that no SIGINT asked for: code that the job names has raised it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.asked_at_s = math.inf
        """Time of the signal, on the clock of time.monotonic."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # SIGHUP: the terminal was closed, and the launcher passes it on.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or not ignores_hangup():
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and self.signal is not signal.SIGINT:
            raise MeshwrightError(
                f"the job's own code interrupted the run by {place_of(error)}, without a signal: let it raise an "
                "error, or return, then start again with --resume"
            ) from error
        if error is not None:
            return  # keep ignoring signals: the process exits with the error
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        # No logging: a handler may run inside a write to the same stream, and all ranks decide together.
        if self.signal is None:
            self.signal = signal.Signals(number)
            self.asked_at_s = time.monotonic()


class StopSignals:
    """Context manager of a launcher, which passes on the signals that ask it to stop; the main thread receives them.

    In another thread it does nothing: Python handles signals in the main thread only.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first that `take` returned."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.descriptor, self._write_end = os.pipe()
        """Can be read when a signal has arrived."""
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                if number != signal.SIGHUP or not ignores_hangup():
                    self._previous[number] = signal.signal(number, _do_nothing)
            # Written at once, whichever thread the signal interrupts; a handler would wait for the main thread.
            self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.descriptor)
        os.close(self._write_end)

    def take(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call, oldest first."""
        try:
            arrived = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        taken = [number for number in map(signal.Signals, arrived) if number in self._previous]
        self.first = self.first or next(iter(taken), None)
        return taken

    def sleep(self, duration_s: float) -> None:
        """Return after `duration_s`, or as soon as a signal has arrived."""
        select.select([self.descriptor], [], [], duration_s)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def ignore_stops() -> None:
    """Ignore signals, so that none changes the exit code of a process that has finished."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def ignores_hangup() -> bool:
    """Return whether this process ignores SIGHUP, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent dies, so that no rank is orphaned (Linux only).

    Of a rank that torchrun started, that is the launcher; of one that is forked, the fork server.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
