"""Hangs that a stop of the launcher ends, as events of the run: which ranks had not moved, and since when."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from meshwright.fault_tolerance.evidence import Evidence, look, read_heartbeats
from meshwright.fault_tolerance.hangs.hang_limit import LONG_PHASES, are_in_step
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event


def survivors_of(evidence: Evidence) -> list[int]:
    """Return the ranks of this host whose process has not ended."""
    return [rank for rank, state in evidence.processes.items() if state in ("running", "stopped")]


def append_hang(run: Run, moved_s: float) -> None:
    """Write that no rank has moved since `moved_s`, in seconds since 1970."""
    now_s = time.time()
    with suppress(OSError):  # a full disk
        append_event(run, "hang", duration_s=now_s - moved_s, time_s=now_s)


def note_hang(run: Run, folders: Sequence[Run]) -> None:
    """Record where no rank with a heartbeat in `folders`, the run's or its independent replicas', moves any more.

    A step counts as a hang here once it takes what `diagnose` no longer calls slow.
    """
    whole = look(run)
    evidence = [whole if folder is run else look(folder) for folder in folders]
    alive = [one.heartbeats[rank] for one in evidence for rank in survivors_of(one)]
    if not are_in_step(alive, whole.start_step):
        return
    moved_s = max(beat.time_s for beat in alive)
    if whole.now_s - moved_s > whole.slow_s:
        append_hang(run, moved_s)


def note_hang_until_killed(run: Run, own: Run, asked_s: float, killed: Collection[int]) -> None:
    """Record that ranks which had to be `killed`, process ids, had not moved since they were asked to stop.

    Their heartbeats are in `own`, that of their independent replica or `run`; `asked_s` is in seconds since 1970.
    """
    beats = [beat for beat in read_heartbeats(own).values() if beat.pid in killed]
    if beats and all(beat.time_s < asked_s and beat.phase not in LONG_PHASES for beat in beats):
        append_hang(run, max(beat.time_s for beat in beats))
