"""The package's loggers; the command line decides where their lines go."""

import logging

logger = logging.getLogger("meshwright")

progress = logging.getLogger("meshwright.progress")
"""What a command is doing, for a reader who waits; --quiet turns it off."""
progress.setLevel(logging.INFO)


def shows_progress() -> bool:
    """Return whether spinners and lines of progress are wanted."""
    return progress.isEnabledFor(logging.INFO)
