"""FailureNote: by which the ranks of one launch know that one of them has failed, which, and of what."""

import os
from contextlib import suppress

from meshwright.spec.run.run import Run


class FailureNote:
    """A file in the hangs folder of a launch; one that starts later has a folder of its own, of the same name."""

    def __init__(self, run: Run) -> None:
        """Write into the folder that is there now, or is made now."""
        self._path = run.failure
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not by its name: a rank that was frozen, whose launcher is gone, may fail when another launch trains.
        self._folder = os.open(self._path.parent, os.O_RDONLY)

    def exists(self) -> bool:
        """Return whether a rank has failed."""
        return self._path.exists()

    def write(self, rank: int, error: str) -> None:
        """Note that a rank has failed; nothing happens where one has before, or where the folder was removed."""
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(self._path.name, flags, 0o644, dir_fd=self._folder)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(f"rank {rank} failed ({error})")

    def read(self) -> str:
        """Return which rank failed and why; "another failed" where it could not say."""
        with suppress(OSError, UnicodeDecodeError):
            return self._path.read_text(encoding="utf-8") or "another failed"
        return "another failed"

    def close(self) -> None:
        """Close the folder; the file stays."""
        os.close(self._folder)
