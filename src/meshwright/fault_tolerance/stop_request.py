"""A wish to stop, from a signal: kept until the step is complete, so that nothing is torn."""

import ctypes
import signal
import sys
from types import FrameType, TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Remembers the first SIGTERM, SIGHUP or SIGINT while it is entered; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # SIGHUP: the terminal was closed, and the launcher passes it on.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or not ignores_hangup():
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            return  # the process ends with the error, whatever signal comes while it does
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        # No word here: a handler may run inside a write to the same stream, and only all ranks together decide.
        if self.signal is None:
            self.signal = signal.Signals(number)


def ignore_stops() -> None:
    """Let no signal change the exit code of a process whose work has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def ignores_hangup() -> bool:
    """Return whether this process was started to outlive its terminal, as by nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its launcher dies, so that no rank is orphaned (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
