"""Reads the stacks that Python's faulthandler writes on a signal, even from a process whose Python cannot run."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.spec.run.flight_record import Frame

_THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def read_stack(path: Path) -> list[Frame]:
    """Return the newest stack of the main thread in `path`, the outermost call first; empty where there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The threads come newest first, so that the main one, the oldest, is the last.
    frames = _FRAME.findall(_THREAD.split(text)[-1])
    return [Frame(file=file, line=int(line), function=function) for file, line, function in reversed(frames)]
