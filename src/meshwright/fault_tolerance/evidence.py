"""What a run's folder and its processes show of a hang: heartbeats, flight records, process states, the usual step."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from meshwright.fault_tolerance.heartbeat import process_fields, read_heartbeats
from meshwright.fault_tolerance.stack_file import read_stack
from meshwright.spec.run.diagnosis import ProcessState
from meshwright.spec.run.flight_record import FlightRecord, Frame
from meshwright.spec.run.heartbeat import LAST_PHASES, Heartbeat
from meshwright.spec.run.run import Run

_NUM_RECENT_STEPS = 20
_LEAST_SLOW_S = 5.0
_SLOW_STEPS = 3
"""A loop that is silent for so many usual steps stands still."""


# Those that may answer, as far as this host can tell.
_ABLE: tuple[ProcessState, ...] = ("running", "elsewhere")
_WRITING_S = 0.3
_CLOCK_S = 0.05
"""By how much the clocks of a file system and of a rank may differ: heartbeats are rounded, files have ticks."""


@dataclass(frozen=True)
class Evidence:
    """What is known of each rank, by rank."""

    heartbeats: dict[int, Heartbeat]
    processes: dict[int, ProcessState]
    records: dict[int, FlightRecord]
    stacks: dict[int, list[Frame]]
    """Where the loop of a rank is; of one that could write no record, what a signal made it tell."""
    now_s: float
    """When it was gathered, in seconds since 1970."""
    slow_s: float
    """Seconds of silence up to which a rank may just be slow."""
    stale: tuple[int, ...] = ()
    """Ranks whose flight record is older than their last mark: it says where they were, and is left out."""

    def silent_s(self, rank: int) -> float:
        """Return the seconds since the last mark of a rank."""
        return max(0.0, self.now_s - self.heartbeats[rank].time_s)


def ask(run: Run, wait_s: float) -> None:
    """Ask the ranks of `run` that are alive for their flight records, and wait `wait_s` at most until they are there.

    A rank's watch answers within a second or two. One that does not is asked by SIGUSR1, where it is on this host, for
    its stacks: it writes those even where Python cannot run.
    """
    asked_s, heartbeats = time.time(), read_heartbeats(run)
    states = {rank: process_state(one) for rank, one in heartbeats.items()}
    able = [rank for rank, one in heartbeats.items() if one.phase not in LAST_PHASES and states[rank] in _ABLE]
    if not able:
        return
    run.hang_request.write_text(f"{asked_s}\n", encoding="utf-8")
    deadline_s = time.monotonic() + wait_s
    while (mute := [rank for rank in able if not _answered(run, rank, asked_s)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    silent = [rank for rank in mute if states[rank] == "running"]
    for rank in silent:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(heartbeats[rank].pid, signal.SIGUSR1)
    if silent:
        time.sleep(_WRITING_S)


def look(run: Run) -> Evidence:
    """Return what `run` shows now."""
    heartbeats = read_heartbeats(run)
    found = {rank: read_record(run, rank, one.pid) for rank, one in heartbeats.items()}
    known = {rank: record for rank, record in found.items() if record is not None}
    records = {rank: record for rank, record in known.items() if _is_current(record, heartbeats[rank])}
    return Evidence(
        heartbeats,
        {rank: process_state(one) for rank, one in heartbeats.items()},
        records,
        {rank: records[rank].stack if rank in records else _stack(run, one) for rank, one in heartbeats.items()},
        time.time(),
        max(_LEAST_SLOW_S, _SLOW_STEPS * usual_step_s(run)),
        tuple(sorted(set(known) - set(records))),
    )


def _is_current(record: FlightRecord, heartbeat: Heartbeat) -> bool:
    """Return whether a rank has made no mark since its record; the last mark of one that failed follows its record."""
    return record.error is not None or record.time_s >= heartbeat.time_s - _CLOCK_S


def _stack(run: Run, heartbeat: Heartbeat) -> list[Frame]:
    """Return the stack that a rank wrote on a signal; empty where it is older than the rank's last mark."""
    path = run.stack(heartbeat.rank)
    with suppress(OSError):
        if path.stat().st_mtime >= heartbeat.time_s - _CLOCK_S:
            return read_stack(path)
    return []


def read_record(run: Run, rank: int, pid: int) -> FlightRecord | None:
    """Return a rank's flight record, None where this process of it has written none."""
    try:
        record = FlightRecord.from_json(run.flight_record(rank).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return record if record.pid == pid else None


def process_state(heartbeat: Heartbeat) -> ProcessState:
    """Return what has become of the process that wrote a heartbeat."""
    if heartbeat.host != socket.gethostname() or heartbeat.started_ticks is None:
        return "elsewhere"
    fields = process_fields(heartbeat.pid)
    # Z: dead, and not yet missed by its parent. Another start: another process has got its id.
    if fields is None or fields[0] in "ZX" or int(fields[19]) != heartbeat.started_ticks:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def usual_step_s(run: Run) -> float:
    """Return the median time of the newest steps, 0 before the first."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()[-_NUM_RECENT_STEPS:]
        rows = [json.loads(line) for line in lines]
    except (OSError, json.JSONDecodeError):
        # Read in the middle of a write, or not written yet.
        return 0.0
    steps_s = [row["step_ms"] / 1e3 for row in rows if "step_ms" in row]
    return statistics.median(steps_s) if steps_s else 0.0


def _answered(run: Run, rank: int, asked_s: float) -> bool:
    with suppress(OSError):
        # The clock of a shared folder may lag behind this one by a tick.
        return run.flight_record(rank).stat().st_mtime >= asked_s - 1
    return False
