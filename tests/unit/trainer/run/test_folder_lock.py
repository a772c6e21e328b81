"""What a second process is told of a run folder that ranks still hold."""

import os
from pathlib import Path

import pytest

from meshwright.errors import Retryable
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import hold


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
