"""output_in(): what this process and those that it starts print, in a file."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Send standard output and error of this process, and of those that it starts meanwhile, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, former in zip((1, 2), kept, strict=True):
            os.dup2(former, descriptor)
            os.close(former)
