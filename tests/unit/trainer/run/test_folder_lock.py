"""What a second process is told of a run folder that ranks still hold."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import Retryable
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import ManifestFile, hold, hold_alone, read_manifest
from written_runs import write_run


def test_a_held_folder_names_the_ranks_that_are_alive(tmp_path: Path) -> None:
    held = hold(Run(tmp_path))
    try:
        with pytest.raises(Retryable, match=r"training into [^ ]*: wait until it has ended"):
            hold(Run(tmp_path))
        HeartbeatFile(Run(tmp_path), rank=0, num_ranks=1).mark("data", step=1)
        with pytest.raises(Retryable, match=rf"\(ranks with the process ids {os.getpid()}\).*killed end by themselves"):
            hold(Run(tmp_path))
    finally:
        os.close(held)


def test_a_frozen_rank_of_an_earlier_launch_is_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    program = (
        "import os, signal, sys; from meshwright.fault_tolerance.evidence import HeartbeatFile; "
        "from meshwright.spec.run.run import Run; "
        "HeartbeatFile(Run(sys.argv[1]), 0, 1).mark('gradients', 3); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    frozen = subprocess.Popen([sys.executable, "-c", program, str(run.of_replica(1).folder)])
    os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
    os.close(hold_alone(run, 60.0))
    assert frozen.wait(60) == -signal.SIGKILL


def test_an_attempt_that_was_given_up_leaves_the_manifest_of_a_later_one(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", [], num_attempts=1))
    manifest = read_manifest(run)
    assert manifest is not None
    old = ManifestFile(run, manifest)
    ManifestFile(run, manifest.replace(attempts=[*manifest.attempts, *manifest.attempts]))
    old.close(75)
    after = read_manifest(run)
    assert after is not None
    assert len(after.attempts) == 2
