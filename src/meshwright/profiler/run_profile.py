"""Timeline of a step in the profiler window of a run."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.profiler.profiled_timeline import timeline_of
from meshwright.spec.run.run import HOW_TO_PROFILE, Run
from meshwright.spec.trace.timeline import Timeline

_TRACE = re.compile(r"step-(\d+)-rank-\d+\.json\.gz")


def profiled_files(folder: Path) -> list[Path]:
    """Return the traces of the newest window of the run in `folder`, one per rank, or []."""
    found = {
        file: int(match[1]) for file in Run(folder).timelines.glob("*.gz") if (match := _TRACE.fullmatch(file.name))
    }
    return sorted(file for file, start in found.items() if start == max(found.values()))


def profile_of_run(folder: Path, step: int | None = None) -> Timeline:
    """Return the last step of the window, or `step`; raises ConfigError without a profile."""
    files = profiled_files(folder)
    if not files:
        raise ConfigError(f"{folder} has no profile: {HOW_TO_PROFILE}")
    return timeline_of(files, str(folder), step)
