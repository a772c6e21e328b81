"""The package's loggers; the command line decides where their lines go."""

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

LogLevel = Literal["DEBUG", "INFO", "WARNING"]

logger = logging.getLogger("meshwright")

progress = logging.getLogger("meshwright.progress")
"""What a command is doing, for a reader who waits; --quiet turns it off."""
progress.setLevel(logging.INFO)


MIN_WIDTH = 20
"""Columns in which messages and pages are printed at least, however narrow the terminal says it is."""


def fitted(message: str) -> str:
    """Return a message for stderr, wrapped between words where that is a terminal or COLUMNS says how wide it is."""
    if not sys.stderr.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return message
    width = max(shutil.get_terminal_size().columns, MIN_WIDTH)
    lines = (
        textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in message.splitlines()
    )
    return "\n".join("\n".join(line) for line in lines)


@contextmanager
def warning_if_unwritten(path: Path) -> Iterator[None]:
    """Say in one line that `path` was not written, where a write in the context raises OSError.

    For what records a failure: a full disk then neither hides the failure nor adds its traceback.
    """
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error.strerror)


def shows_progress() -> bool:
    """Return whether spinners and lines of progress are wanted."""
    return progress.isEnabledFor(logging.INFO)


def log_level() -> LogLevel:
    """Return the least level of what a user sees: DEBUG with --verbose, WARNING with --quiet."""
    if logger.level == logging.DEBUG:
        return "DEBUG"
    return "INFO" if shows_progress() else "WARNING"


def set_log_level(level: LogLevel) -> None:
    """Let log_level() return `level`; log files have INFO at least."""
    logger.setLevel("DEBUG" if level == "DEBUG" else "INFO")
    progress.setLevel("WARNING" if level == "WARNING" else "INFO")
