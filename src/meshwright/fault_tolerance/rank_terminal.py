"""The terminal of a rank whose output goes to its log: for the little that a reader of the launcher's end must see."""

import os
from contextlib import suppress

_STDERR = 2


class _Kept:
    descriptor: int | None = None


def keep_terminal(descriptor: int | None) -> None:
    """Let `say_on_terminal` write there, too; None: standard error is the terminal."""
    _Kept.descriptor = descriptor


def say_on_terminal(what: str) -> None:
    """Write a line to standard error and, where that is a log, to the terminal; any thread may.

    By descriptor: another thread may hang in a print.
    """
    for descriptor in {_STDERR, _Kept.descriptor or _STDERR}:
        with suppress(OSError):  # a terminal that was closed
            os.write(descriptor, f"{what}\n".encode())
