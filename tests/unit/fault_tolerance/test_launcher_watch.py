"""The launcher ends the ranks that outlive a failed one, and keeps the diagnosis of what they were in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.fault_tolerance import launcher_watch
from meshwright.fault_tolerance.evidence import HeartbeatFile, look
from meshwright.fault_tolerance.launcher_watch import LauncherWatch, last_diagnosis
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.run import Run

RANK = """
import sys, time
from pathlib import Path
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.spec.run.run import Run
HeartbeatFile(Run(Path(sys.argv[1])), rank=1, num_ranks=2).mark("action 0F1", step=5)
print("started", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def suspended(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 of a run in `tmp_path`: a process that has written a heartbeat and is suspended since."""
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.kill(process.pid, signal.SIGSTOP)
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["reports its failure", "is killed"])
def test_a_rank_that_outlives_a_failed_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended: subprocess.Popen[str], way: str
) -> None:
    monkeypatch.setattr(launcher_watch, "GRACE_S", 0.5)
    run = Run(tmp_path)
    run.hangs.mkdir()
    if way == "is killed":
        # A process that is gone, in a phase after which others follow.
        HeartbeatFile(run, rank=0, num_ranks=2).mark("data", step=5)
        gone = run.heartbeat(0).read_text().replace(f'"pid": {os.getpid()}', '"pid": 99999999')
        run.heartbeat(0).write_text(gone)
    else:
        run.failure.touch()
    with LauncherWatch(run, RunSection(hang_after_s=0.0)) as watch:
        assert suspended.wait(600) == -signal.SIGKILL
    assert watch.killed == {suspended.pid}
    kept = last_diagnosis(run, look(run))
    assert kept is not None
    assert kept.ranks[-1].process == "stopped"
    assert "rank 1 did not end within" in kept.evidence[-1]


@pytest.mark.slow
def test_no_rank_is_killed_where_none_failed(tmp_path: Path, suspended: subprocess.Popen[str]) -> None:
    with LauncherWatch(Run(tmp_path), RunSection(hang_after_s=0.0)) as watch, pytest.raises(subprocess.TimeoutExpired):
        suspended.wait(2 * launcher_watch._POLL_S)
    assert not watch.killed
    assert last_diagnosis(Run(tmp_path), look(Run(tmp_path))) is None
