"""Heartbeats: one small file per rank, overwritten in place by the training loop at every phase.

The loop writes it, not another thread, which would continue while the loop hangs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from pydantic import ValidationError

from meshwright.spec.run.rank_records import Heartbeat
from meshwright.spec.run.run import Run

# Fixed length, so that a shorter text overwrites a longer one completely.
_NUM_BYTES = 512
_READ_ATTEMPTS = 5


class HeartbeatFile:
    """This rank's heartbeat file; a write takes microseconds."""

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
        self.waits_for_rank: int | None = None

    def mark(self, phase: str, step: int | None = None, waits_for_rank: int | None = None) -> None:
        """Write that the loop is in `phase`, and from now on in `step` if given."""
        self.step = self.step if step is None else step
        self.phase, self.waits_for_rank, self.beaten_s = phase, waits_for_rank, time.monotonic()
        peer = "null" if waits_for_rank is None else waits_for_rank
        text = (
            f'{self._start}, "step": {self.step}, "phase": "{phase}", "waits_for_rank": {peer}, '
            f'"time_s": {time.time():.3f}}}'
        )
        os.pwrite(self._file, text.encode().ljust(_NUM_BYTES), 0)

    def close(self) -> None:
        """Close the file; its content stays."""
        os.close(self._file)


def read_heartbeats(run: Run) -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each rank that has one, by rank."""
    found = [_read(path) for path in sorted(run.heartbeats.glob("rank-*.json"))]
    return {one.rank: one for one in sorted((one for one in found if one is not None), key=lambda one: one.rank)}


def started_ticks(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None without /proc."""
    fields = process_fields(pid)
    return None if fields is None else int(fields[19])


def process_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None without such a process or without /proc."""
    try:
        # The process name before the state may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _read(path: Path) -> Heartbeat | None:
    """Return the heartbeat in a file, None if its rank has written none yet."""
    for attempt in range(_READ_ATTEMPTS):
        try:
            return Heartbeat.from_json(path.read_text(encoding="utf-8"))
        except (ValidationError, FileNotFoundError):
            # Read during a write, or not written yet.
            time.sleep(0.01 * attempt)
    return None
