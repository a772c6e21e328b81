"""What is said of checkpoint.memory_dir before a run, and which copies in memory are garbage."""

import socket
from pathlib import Path
from unittest.mock import patch

import pytest

from meshwright.checkpoint.memory import memory_dir_notes
from meshwright.checkpoint.memory.describe_memory import describe_memory, memory_garbage
from meshwright.checkpoint.memory.memory_folder import MemoryFolder, memory_folder, new_owner
from meshwright.hardware.machine import file_system_of
from meshwright.spec.run.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    return run


def copies_of(run: Run, parent: Path, step: int) -> MemoryFolder:
    owner = new_owner(run)
    folder = memory_folder(str(parent), owner.id)
    folder.open(owner)
    folder.copy(step).mkdir()
    (folder.copy(step) / "rank-00000.bin").write_bytes(b"1234")
    return folder


def test_a_folder_in_memory_is_distinguished_from_one_on_a_disk() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm")
    assert file_system_of(Path("/dev/shm")) == "tmpfs"
    assert file_system_of(Path("/proc/self")) == "proc"
    assert list(memory_dir_notes.memory_dir_notes("/dev/shm", 0)) == []


def test_too_little_memory_and_a_disk_are_said(tmp_path: Path) -> None:
    with (
        patch.object(memory_dir_notes, "file_system_of", lambda folder: "ext4"),
        patch.object(memory_dir_notes, "free_disk_bytes", lambda folder: 100),
    ):
        on_disk, small = memory_dir_notes.memory_dir_notes(str(tmp_path), 51)
        assert len([*memory_dir_notes.memory_dir_notes(str(tmp_path), 50)]) == 1
    assert "ext4" in on_disk
    assert "102 B" in small


def test_the_host_has_its_place_in_the_name() -> None:
    assert memory_folder("/mnt/{host}", "1").folder.parent == Path("/mnt") / socket.gethostname()


def test_copies_of_a_rank_that_lives_are_in_use_and_spared(run: Run, tmp_path: Path) -> None:
    folder = copies_of(run, tmp_path / "memory", 7)
    [record] = describe_memory(run, str(tmp_path / "memory"))
    assert (record.state, record.steps) == ("in use", [7])
    removals, [spared] = memory_garbage(run, str(tmp_path / "memory"), is_running=False, with_usable=True)
    assert not removals
    assert "trains" in spared.reason
    assert folder.remove()


def test_copies_go_where_the_disk_is_as_new_or_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    folder = copies_of(run, tmp_path / "memory", 7)
    folder.release()

    def removed(**options: bool) -> int:
        return len(memory_garbage(run, str(tmp_path / "memory"), is_running=False, **options)[0])

    assert removed(with_usable=False) == 0
    assert removed(with_usable=True) == 1
    run.checkpoint(7).mkdir()
    assert removed(with_usable=False) == 1


def test_copies_of_a_run_that_is_gone_are_garbage_of_any_run(run: Run, tmp_path: Path) -> None:
    gone = Run(tmp_path / "gone")
    gone.folder.mkdir()
    folder = copies_of(gone, tmp_path / "memory", 7)
    assert describe_memory(run, str(tmp_path / "memory")) == []
    gone.memory_owner.unlink()
    assert describe_memory(run, str(tmp_path / "memory")) == []  # a rank holds it, where this process sees no run
    folder.release()
    [record] = describe_memory(run, str(tmp_path / "memory"))
    assert record.state == "orphaned"
