"""Ranks that ended without a word are named by those that lost them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.fault_tolerance import vanished_ranks
from meshwright.fault_tolerance.evidence import started_ticks
from meshwright.fault_tolerance.vanished_ranks import vanished_text
from meshwright.spec.run.run import Run


def write_heartbeat(run: Run, rank: int, pid: int, phase: str) -> None:
    run.heartbeats.mkdir(parents=True, exist_ok=True)
    beat = {"rank": rank, "num_ranks": 3, "pid": pid, "host": os.uname().nodename, "step": 3, "phase": phase}
    beat |= {"started_ticks": started_ticks(pid), "waits_for_rank": None, "time_s": 1000.0}
    run.heartbeat(rank).write_text(json.dumps(beat), encoding="utf-8")


@pytest.mark.parametrize("phase", ["data", "failed"])
def test_a_rank_that_called_exit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr(vanished_ranks, "_WAIT_S", 0.05)
    run = Run(tmp_path)
    write_heartbeat(run, 0, os.getpid(), "forward")
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as process:
        write_heartbeat(run, 1, process.pid, phase)
        assert vanished_text(run) == ""
        process.communicate(b"end\n")
    named = f"ended without an error of its own: rank 1 (pid {process.pid}) in step 3, data"
    # One that failed has said why itself.
    assert vanished_text(run).startswith(named) is (phase == "data")
