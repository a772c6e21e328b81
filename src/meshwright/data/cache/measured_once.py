"""measured_once: what one process measures of a source, and others read from a file."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def measured_once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object in `path`, which the first process to ask measures and writes while others wait.

    A folder that cannot be written is no error here: each process then measures.
    """
    if (known := _read(path)) is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have measured it while this one waited.
            if (known := _read(path)) is None:
                known = measure()
                write_whole(path, json.dumps(known).encode())
            return known
    except OSError:
        return measure()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(data)
    partial.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
