"""is_running: whether ranks of a run are alive, from their heartbeats; needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.fault_tolerance.evidence import process_state
from meshwright.fault_tolerance.heartbeat_file import read_heartbeats
from meshwright.spec.run.rank_records import LAST_PHASES
from meshwright.spec.run.run import Run

SILENT_ELSEWHERE_S = 24 * 3600.0
"""A rank of another host that is silent for longer is taken to be gone; its process cannot be looked at from here."""


def is_running(run: Run, now_s: Callable[[], float] = time.time) -> bool:
    """Return whether a rank of `run` is alive: its process exists on this host, or it wrote recently on another."""
    for heartbeat in read_heartbeats(run).values():
        if heartbeat.phase in LAST_PHASES:
            continue
        state = process_state(heartbeat)
        if state == "elsewhere" and now_s() - heartbeat.time_s < SILENT_ELSEWHERE_S:
            return True
        if state in ("running", "stopped"):
            return True
    return False
