"""Stop request by a signal, honoured after the current step."""

import ctypes
import math
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Context manager that records the first SIGTERM, SIGHUP or SIGINT; a second SIGINT interrupts at once."""

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


def ignore_stops() -> None:
    """Ignore signals, so that none changes the exit code of a process that has finished."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def ignores_hangup() -> bool:
    """Return whether this process ignores SIGHUP, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its launcher dies, so that no rank is orphaned (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
