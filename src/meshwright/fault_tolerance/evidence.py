"""Evidence of a hang: heartbeats, flight records, process states and the median step time; needs no torch.

Heartbeats: one small file per rank, overwritten in place by the training loop at every phase.
The loop writes it, not another thread, which would continue while the loop hangs.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from meshwright.log import logger
from meshwright.spec.run.rank_records import LAST_PHASES, EndedBySignal, FlightRecord, Frame, Heartbeat, ProcessState
from meshwright.spec.run.run import Manifest, Run

_THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NUM_RECENT_STEPS = 20
_LEAST_SLOW_S = 5.0
_SLOW_STEPS = 3
"""A loop that is silent for this many median steps is considered stuck."""

# States of processes that may answer a request.
_ABLE: tuple[ProcessState, ...] = ("running", "elsewhere")
_WRITING_S = 0.3
_CLOCK_S = 0.05
"""Tolerance between file times and a rank's clock: heartbeats are rounded, file times have ticks."""


@dataclass(frozen=True)
class Evidence:
    """Observations by rank."""

    heartbeats: dict[int, Heartbeat]
    processes: dict[int, ProcessState]
    records: dict[int, FlightRecord]
    stacks: dict[int, list[Frame]]
    """Stack of a rank's training loop: from its flight record, else from SIGUSR1."""
    now_s: float
    """Time of collection, in seconds since 1970."""
    slow_s: float
    """Seconds of silence up to which a rank counts as slow, not stuck."""
    stale: tuple[int, ...] = ()
    """Ranks whose flight record is older than their heartbeat, and omitted."""
    saved_step: int = 0
    """Step of the newest checkpoint, from which ranks may have resumed."""
    exit_code: int | None = None
    """How the newest attempt ended, by the run's manifest; None where that does not say."""
    start_step: int = 0
    """Step from which the newest attempt started, by the run's manifest."""
    failure: str = ""
    """Which rank of the newest attempt failed first and of what, in words, such as "rank 0 failed (OSError: ...)"; ""
    where none could say."""
    signals: Mapping[int, str] = field(default_factory=dict)
    """The signal that ended a rank of this attempt, such as SIGABRT, by rank; of ranks of our own launcher."""

    def silent_s(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat."""
        return max(0.0, self.now_s - self.heartbeats[rank].time_s)


def ask(run: Run, wait_s: float) -> None:
    """Request the flight records of the live ranks of `run` and wait for them, `wait_s` at most.

    A rank's watch thread answers within a second or two. A rank of this host that does not gets SIGUSR1, on which it
    writes its stacks even if Python cannot run.
    """
    asked_s, heartbeats = time.time(), read_heartbeats(run)
    states = {rank: process_state(one) for rank, one in heartbeats.items()}
    able = [rank for rank, one in heartbeats.items() if one.phase not in LAST_PHASES and states[rank] in _ABLE]
    if not able:
        return
    try:
        # An independent replica has none before its first hang.
        run.hang_request.parent.mkdir(parents=True, exist_ok=True)
        run.hang_request.write_text(f"{asked_s}\n", encoding="utf-8")
    except OSError as error:
        # A full disk, which takes no record either; the diagnosis says which are missing.
        logger.debug("%s could not be written: %s", run.hang_request, error.strerror)
        wait_s = 0.0
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
    """Return the current evidence of `run`."""
    heartbeats, manifest = read_heartbeats(run), _manifest(run)
    found = {rank: read_record(run, rank, one.pid) for rank, one in heartbeats.items()}
    known = {rank: record for rank, record in found.items() if record is not None}
    records = {rank: record for rank, record in known.items() if _is_current(record, heartbeats[rank])}
    return Evidence(
        heartbeats,
        {rank: process_state(one) for rank, one in heartbeats.items()},
        records,
        {rank: records[rank].stack if rank in records else _stack(run, one) for rank, one in heartbeats.items()},
        time.time(),
        max(_LEAST_SLOW_S, _SLOW_STEPS * median_step_s(run)),
        tuple(sorted(set(known) - set(records))),
        max(run.checkpoint_steps(), default=0),
        None if manifest is None else manifest.exit,
        manifest.attempts[-1].start_step if manifest is not None and manifest.attempts else 0,
        _failure(run),
        _signals(run, heartbeats),
    )


def _manifest(run: Run) -> Manifest | None:
    try:
        return Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def _failure(run: Run) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return run.failure.read_text(encoding="utf-8")
    return ""


def _signals(run: Run, heartbeats: Mapping[int, Heartbeat]) -> dict[int, str]:
    try:
        by_pid = EndedBySignal.from_json(run.ended_by_signal.read_text(encoding="utf-8")).by_pid
    except (OSError, UnicodeDecodeError, ValidationError):
        return {}
    return {rank: by_pid[one.pid] for rank, one in heartbeats.items() if one.pid in by_pid}


def _is_current(record: FlightRecord, heartbeat: Heartbeat) -> bool:
    """Return whether a record is not older than the heartbeat; a failed rank writes its heartbeat after its record."""
    return record.error is not None or record.time_s >= heartbeat.time_s - _CLOCK_S


def _stack(run: Run, heartbeat: Heartbeat) -> list[Frame]:
    """Return the stack that a rank wrote on a signal; [] if it is older than the heartbeat."""
    path = run.stack(heartbeat.rank)
    with suppress(OSError):
        if path.stat().st_mtime >= heartbeat.time_s - _CLOCK_S:
            return read_stack(path)
    return []


def read_record(run: Run, rank: int, pid: int) -> FlightRecord | None:
    """Return a rank's flight record, None if its current process has written none."""
    try:
        record = FlightRecord.from_json(run.flight_record(rank).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return record if record.pid == pid else None


def process_state(heartbeat: Heartbeat) -> ProcessState:
    """Return the state of the process that wrote a heartbeat."""
    if heartbeat.host != socket.gethostname() or heartbeat.started_ticks is None:
        return "elsewhere"
    fields = process_fields(heartbeat.pid)
    # Z: a zombie. Another start time: another process with the same id.
    if fields is None or fields[0] in "ZX" or int(fields[19]) != heartbeat.started_ticks:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def median_step_s(run: Run) -> float:
    """Return the median time of the newest steps, 0 before the first."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()[-_NUM_RECENT_STEPS:]
        rows = [json.loads(line) for line in lines]
    except (OSError, json.JSONDecodeError):
        # Read during a write, or not written yet.
        return 0.0
    steps_s = [row["step_ms"] / 1e3 for row in rows if "step_ms" in row]
    return statistics.median(steps_s) if steps_s else 0.0


def _answered(run: Run, rank: int, asked_s: float) -> bool:
    with suppress(OSError):
        # The clock of a shared folder may lag by a tick.
        return run.flight_record(rank).stat().st_mtime >= asked_s - 1
    return False


def read_stack(path: Path) -> list[Frame]:
    """Return the newest stack of the main thread that faulthandler wrote to `path`, outermost call first, or []."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # Threads are listed newest first; the main thread is the last.
    frames = _FRAME.findall(_THREAD.split(text)[-1])
    return [Frame(file=file, line=int(line), function=function) for file, line, function in reversed(frames)]


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


# Fixed length, so that a shorter text overwrites a longer one completely.
_NUM_BYTES = 512
_READ_ATTEMPTS = 5


class HeartbeatFile:
    """This rank's heartbeat file; a write takes microseconds."""

    def __init__(self, run: Run, rank: int, num_ranks: int) -> None:
        run.heartbeats.mkdir(parents=True, exist_ok=True)
        pid, launcher = os.getpid(), multiprocessing.parent_process()
        identity = {
            "rank": rank,
            "num_ranks": num_ranks,
            "pid": pid,
            "host": socket.gethostname(),
            "started_ticks": started_ticks(pid),
            "launcher_pid": None if launcher is None else launcher.pid,
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
