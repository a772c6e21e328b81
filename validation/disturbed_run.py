"""Failures that are made to happen to a run of real ranks, from outside: SIGKILL, or SIGSTOP for a hang."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.fault_tolerance.evidence import process_fields, read_heartbeats
from meshwright.fault_tolerance.hangs.hang_limit import are_in_step
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import read_manifest
from validation.failure_replay import Failure

_POLL_S = 0.01


@dataclass(frozen=True)
class Happened:
    """A failure that was made to happen."""

    failure: Failure
    began_s: float
    """In seconds since 1970, as the following."""
    ended_s: float
    """When all ranks of the attempt had ended."""
    was_hang: bool
    was_in_restart: bool


def disturb(launcher: "subprocess.Popen[bytes]", run: Run, failures: list[Failure]) -> list[Happened]:
    """Make failures happen to a run until it has ended; return those that did."""
    draw, happened = random.Random(0), list[Happened]()
    while launcher.poll() is None and not run.metrics.exists():
        time.sleep(_POLL_S)
    for failure in failures:
        due_s = time.monotonic() + failure.gap_s
        while launcher.poll() is None and time.monotonic() < due_s:
            time.sleep(_POLL_S)
        while launcher.poll() is None and not (ranks := _ranks_of(launcher.pid)):
            time.sleep(_POLL_S)
        if launcher.poll() is not None:
            break
        hangs = failure.hangs and _is_in_work(run, ranks)
        began_s, last_s = time.time(), happened[-1].ended_s if happened else 0.0
        has_stepped = run.metrics.stat().st_mtime > last_s
        with suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), signal.SIGSTOP if hangs else signal.SIGKILL)
        while launcher.poll() is None and any(_is_alive(pid) for pid in ranks):
            time.sleep(_POLL_S)
        happened.append(Happened(failure, began_s, time.time(), hangs, not has_stepped))
    launcher.wait()
    return happened


def _ranks_of(launcher: int) -> list[int]:
    """Return the process ids of the ranks that a launcher has started: with RANK in their environment, or forked."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            ancestors = _ancestors(pid)
            if launcher not in ancestors or not _is_alive(pid):
                continue
            is_forked = b".forkserver" in Path(f"/proc/{ancestors[0]}/cmdline").read_bytes()
            if is_forked or b"\0RANK=" in (folder / "environ").read_bytes():
                found.append(pid)
    return sorted(found)


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1 and (fields := process_fields(pid)) is not None:
        found.append(pid := int(fields[1]))
    return found


def _is_alive(pid: int) -> bool:
    fields = process_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def _is_in_work(run: Run, ranks: list[int]) -> bool:
    """Return whether all of these ranks are in a step for which there is a limit of hangs."""
    beats = [beat for beat in read_heartbeats(run).values() if beat.pid in ranks]
    manifest = read_manifest(run)
    start_step = manifest.attempts[-1].start_step if manifest is not None else 0
    return len(beats) == len(ranks) and are_in_step(beats, start_step)
