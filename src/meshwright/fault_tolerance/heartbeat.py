"""Heartbeats: one small file for each rank, overwritten in place by the training loop at every mark.

The loop writes it, not a thread next to it: a thread would go on beating while the loop hangs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from pydantic import ValidationError

from meshwright.spec.run.heartbeat import Heartbeat
from meshwright.spec.run.run import Run

# One write of a fixed length: what a shorter mark leaves of a longer one would be no JSON.
_NUM_BYTES = 512
_READ_ATTEMPTS = 5


class HeartbeatFile:
    """This rank's heartbeat; one mark takes microseconds."""

    def __init__(self, run: Run, rank: int, num_ranks: int) -> None:
        run.heartbeats.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        identity = {
            "rank": rank,
            "num_ranks": num_ranks,
            "pid": pid,
            "host": socket.gethostname(),
            "started_ticks": started_ticks(pid),
        }
        # Identity never changes: only the rest is formatted at every mark.
        self._start = json.dumps(identity)[:-1]
        self._file = os.open(run.heartbeat(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.step, self.phase, self.beaten_s = 0, "start", time.monotonic()

    def mark(self, phase: str, step: int | None = None, waits_for_rank: int | None = None) -> None:
        """Say that the loop is in `phase` now, in `step` from now on where it is given."""
        self.step = self.step if step is None else step
        self.phase, self.beaten_s = phase, time.monotonic()
        peer = "null" if waits_for_rank is None else waits_for_rank
        text = (
            f'{self._start}, "step": {self.step}, "phase": "{phase}", "waits_for_rank": {peer}, '
            f'"time_s": {time.time():.3f}}}'
        )
        os.pwrite(self._file, text.encode().ljust(_NUM_BYTES), 0)

    def close(self) -> None:
        """Close the file; its last mark stays."""
        os.close(self._file)


def read_heartbeats(run: Run) -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each rank that has one, by rank."""
    found = [_read(path) for path in sorted(run.heartbeats.glob("rank-*.json"))]
    return {one.rank: one for one in sorted((one for one in found if one is not None), key=lambda one: one.rank)}


def started_ticks(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since the boot; None where the system does not say."""
    fields = process_fields(pid)
    return None if fields is None else int(fields[19])


def process_fields(pid: int) -> list[str] | None:
    """Return what /proc says of a process from its state on, None where there is none (or no /proc)."""
    try:
        # The name before the state may itself hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read(path: Path) -> Heartbeat | None:
    """Return the heartbeat in a file, None for a file whose rank has not marked anything yet."""
    for attempt in range(_READ_ATTEMPTS):
        try:
            return Heartbeat.from_json(path.read_text(encoding="utf-8"))
        except (ValidationError, FileNotFoundError):
            # Read in the middle of a write, or not written yet.
            time.sleep(0.01 * attempt)
    return None
