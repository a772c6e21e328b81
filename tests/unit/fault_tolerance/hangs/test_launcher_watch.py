"""The launcher ends the ranks that outlive a failed one, and keeps the diagnosis of what they were in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.fault_tolerance.evidence import HeartbeatFile, ask, look, read_heartbeats
from meshwright.fault_tolerance.hangs import launcher_watch
from meshwright.fault_tolerance.hangs.launcher_watch import LauncherWatch, last_diagnosis
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events

RANK = """
import signal, sys, time
from pathlib import Path
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.spec.run.run import Run
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
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


def test_ranks_are_asked_where_there_was_no_hang_before(tmp_path: Path, suspended: subprocess.Popen[str]) -> None:
    os.kill(suspended.pid, signal.SIGCONT)
    ask(Run(tmp_path), wait_s=0.1)
    assert Run(tmp_path).hang_request.exists()


@pytest.mark.parametrize(("silent_s", "phase", "is_hang"), [(30.0, "gradients", True), (1.0, "gradients", False)])
def test_a_hang_that_a_signal_ends_is_recorded_at_once(
    tmp_path: Path, silent_s: float, phase: str, is_hang: bool
) -> None:
    run = own_rank(tmp_path, silent_s, phase)
    LauncherWatch(run, RunSection()).note_stop()
    assert [(event.kind, event.duration_s >= silent_s) for event in read_events(run)] == [("hang", True)] * is_hang


@pytest.mark.parametrize(
    ("phase", "asked_after_s", "killed", "is_hang"),
    [
        ("gradients", 10.0, True, True),
        ("gradients", -10.0, True, False),
        ("checkpoint", 10.0, True, False),
        ("gradients", 10.0, False, False),
    ],
)
def test_ranks_that_had_to_be_killed_hung_unless_they_moved_after_the_signal(
    tmp_path: Path, phase: str, asked_after_s: float, killed: bool, is_hang: bool
) -> None:
    run = own_rank(tmp_path, 30.0, phase)
    asked_s = time.time() - 30.0 + asked_after_s
    LauncherWatch(run, RunSection()).note_stopped(asked_s, {os.getpid()} if killed else set())
    assert [event.kind for event in read_events(run)] == ["hang"] * is_hang


@pytest.mark.slow
def test_the_diagnosis_of_ranks_ended_for_a_hang_does_not_deny_it(
    tmp_path: Path, suspended: subprocess.Popen[str]
) -> None:
    run = Run(tmp_path)
    run.hangs.mkdir()
    # Suspended ranks have a verdict of their own.
    suspended.send_signal(signal.SIGCONT)
    with LauncherWatch(run, RunSection(hang_after_s=0.0, hang_limit_s=1.0)):
        assert suspended.wait(600) == -signal.SIGKILL
    kept = last_diagnosis(run, look(run))
    assert kept is not None
    assert kept.verdict not in ("moving", "stopped")
    assert "no hang" not in kept.headline
    assert kept.evidence[-1].startswith("no rank had moved for")


def own_rank(folder: Path, silent_s: float, phase: str) -> Run:
    """Return a run whose only rank is this process, which has been in `phase` of step 9 for `silent_s`."""
    run = Run(folder)
    HeartbeatFile(run, rank=0, num_ranks=1).mark(phase, step=9)
    beat = read_heartbeats(run)[0]
    run.heartbeat(0).write_text(beat.replace(time_s=time.time() - silent_s).to_json(), encoding="utf-8")
    return run
