"""FailureNote: of one launch only."""

import shutil
from pathlib import Path

from meshwright.fault_tolerance.hangs.failure_note import FailureNote
from meshwright.spec.run.run import Run


def test_it_names_the_first_that_failed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    note, other = FailureNote(run), FailureNote(run)
    assert not other.exists()
    note.write(1, "LostPeer: the connection ended")
    other.write(0, "ValueError: later")
    assert other.exists()
    assert other.read() == "rank 1 failed (LostPeer: the connection ended)"
    note.close()
    other.close()


def test_one_that_a_launcher_made_names_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path)
    note = FailureNote(run)
    run.failure.touch()
    assert note.read() == "another failed"
    note.close()


def test_a_rank_of_an_earlier_launch_is_not_heard(tmp_path: Path) -> None:
    run = Run(tmp_path)
    old = FailureNote(run)
    shutil.rmtree(run.hangs)
    new = FailureNote(run)
    old.write(0, "LostPeer: the coordinator is gone")
    assert not new.exists()
    old.close()
    new.close()
