"""How long a rank may outlive its launcher, which was killed: long enough to save, not to hang.

A rank ends itself; one that is frozen cannot, and is killed by the launch that next trains into its run folder.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from meshwright.fault_tolerance.evidence import median_step_s, process_fields, process_state, read_heartbeats
from meshwright.fault_tolerance.hangs.hang_limit import LONG_PHASES
from meshwright.log import logger
from meshwright.spec.run.rank_records import Heartbeat
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event

LONGEST_S: Final = 15.0
"""Seconds that a rank has to reach its checkpoint."""
_STILL_S: Final = 5.0
_USUAL_STEPS: Final = 3.0
_POLL_S: Final = 0.5
_SAVING: Final = ("checkpoint", "finish")


@dataclass(frozen=True)
class Patience:
    """What a rank whose launcher has died at `died_s`, in seconds since 1970, is given."""

    died_s: float
    grace_s: float
    """Seconds in which it may write a checkpoint."""
    usual_step_s: float

    @property
    def longest_s(self) -> float:
        """Return the seconds after which one that writes no checkpoint is to end."""
        return min(LONGEST_S, self.grace_s)

    def is_over(self, beat: Heartbeat | None, now_s: float) -> bool:
        """Return whether a rank with this newest heartbeat, None before the first, is to end now."""
        waited_s = now_s - self.died_s
        if beat is not None and beat.phase in _SAVING:
            return waited_s > self.grace_s
        if waited_s > self.longest_s:
            return True
        return self.is_still(beat, now_s)

    def is_still(self, beat: Heartbeat | None, now_s: float) -> bool:
        """Return whether a step has not moved for longer than a slow one would."""
        if beat is None or beat.phase in LONG_PHASES:
            return False
        return now_s - beat.time_s > max(_STILL_S, _USUAL_STEPS * self.usual_step_s)


def outlive_launcher(run: Run, own: Run, grace_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when this rank, whose launcher has just died, has had its time; it mostly ends by itself before.

    Its heartbeat is in `own`, that of its independent replica or `run`. A rank that hangs has its hang recorded among
    the events of `run`.
    """
    patience = Patience(time.time(), grace_s, median_step_s(run))
    while not patience.is_over(beat := _own_heartbeat(own), now_s := time.time()):
        sleep(_POLL_S)
    if beat is not None and patience.is_still(beat, now_s):
        logger.error(
            "rank %d has not moved for %.0f s and its launcher is gone: it ends", beat.rank, now_s - beat.time_s
        )
        with suppress(OSError):  # a full disk
            append_event(run, "hang", duration_s=now_s - beat.time_s, time_s=now_s)


def end_orphans(run: Run, grace_s: float, sleep: Callable[[float], None] = time.sleep) -> list[Heartbeat]:
    """Return when no rank of an earlier launch into `run`, whose lock is ours, is left on this host.

    Each is waited for as long as it may outlive its launcher; frozen and hung ones, of independent replicas too, are
    killed. The result is those that are there nevertheless: where folders cannot be locked, they may be another's.
    """
    patience, killed = Patience(time.time(), grace_s, median_step_s(run)), set[int]()
    while beats := _orphans(run):
        now_s = time.time()
        late = [beat for beat in beats if beat.pid in killed or patience.is_over(beat, now_s)]
        if len(late) == len(beats) and now_s - patience.died_s > patience.longest_s + _STILL_S:
            return beats
        for beat in beats:
            is_frozen = process_state(beat) == "stopped" or (beat in late and patience.is_still(beat, now_s))
            if is_frozen and beat.pid not in killed:
                logger.warning("rank %d of an earlier launch (pid %d) is frozen: it is killed", beat.rank, beat.pid)
                _kill(beat.pid)
                killed.add(beat.pid)
        sleep(_POLL_S)
    return []


def end_frozen_orphans(run: Run, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Kill the ranks on this host that are frozen and whose launcher is gone; return whether there were any, now gone.

    One of them may hold the lock of `run`, which `end_orphans` needs.
    """
    frozen = [beat for beat in _orphans(run) if process_state(beat) == "stopped" and _has_lost_launcher(beat)]
    for beat in frozen:
        logger.warning("rank %d of an earlier launch (pid %d) is frozen: it is killed", beat.rank, beat.pid)
        _kill(beat.pid)
    deadline_s = time.monotonic() + _STILL_S
    while any(process_state(beat) != "gone" for beat in frozen) and time.monotonic() < deadline_s:
        sleep(_POLL_S)
    return bool(frozen)


def _has_lost_launcher(beat: Heartbeat) -> bool:
    return beat.launcher_pid is not None and process_fields(beat.launcher_pid) is None


def _orphans(run: Run) -> list[Heartbeat]:
    beats = [beat for one in (run, *run.replicas()) for beat in read_heartbeats(one).values()]
    return [beat for beat in beats if beat.pid != os.getpid() and process_state(beat) in ("running", "stopped")]


def _kill(pid: int) -> None:
    """Kill a rank and what it has started; one that torchrun has started may lead no process group of its own."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _own_heartbeat(run: Run) -> Heartbeat | None:
    return next((beat for beat in read_heartbeats(run).values() if beat.pid == os.getpid()), None)
