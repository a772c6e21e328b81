"""Copies in the memory of this machine, of one run and of runs that are gone, and which can be removed; no torch."""

import fcntl
import os
import time
from collections.abc import Iterator

from meshwright.checkpoint.memory.memory_folder import MemoryFolder, is_orphan, memory_folders, owner_of
from meshwright.spec.run.checkpoint_findings import Removal
from meshwright.spec.run.checkpoint_record import MemoryRecord
from meshwright.spec.run.run import Run


def describe_memory(run: Run, memory_dir: str) -> list[MemoryRecord]:
    """Return the copies of `run` on this machine, and those of runs that are gone, which no process writes any more."""
    return [record for _, record in _described(run, memory_dir)]


def memory_garbage(
    run: Run, memory_dir: str, *, is_running: bool, with_usable: bool
) -> tuple[list[tuple[MemoryFolder, Removal]], list[Removal]]:
    """Return which copies on this machine can be removed, and which are spared, with the reason of each.

    Those of `run` that are newer than its checkpoints are what a resume reads: they go `with_usable` only.
    """
    removals, spared = [], []
    newest = max(run.checkpoint_steps(), default=0)
    for folder, record in _described(run, memory_dir):
        reason, problem = "copies in memory of a run that is gone, or began again", None
        if record.state != "orphaned":
            reason = "copies in memory"
            if is_running or record.state == "in use":
                problem = "a process trains into this run"
            elif max(record.steps, default=0) > newest and not with_usable:
                problem = f"a resume continues from step {max(record.steps)} by them: remove them with --memory"
        text = reason if problem is None else f"{reason}: {problem}"
        entry = Removal(name=record.folder, reason=text, num_bytes=record.num_bytes)
        if problem is None:
            removals.append((folder, entry))
        else:
            spared.append(entry)
    return removals, spared


def _described(run: Run, memory_dir: str) -> Iterator[tuple[MemoryFolder, MemoryRecord]]:
    own = owner_of(run)
    for folder in memory_folders(memory_dir):
        try:
            is_own = own is not None and (owner := folder.owner) is not None and owner.id == own.id
            is_held = _is_held(folder)
            if not is_own and (is_held or not is_orphan(folder)):
                continue
            record = MemoryRecord(
                folder=str(folder.folder),
                state="orphaned" if not is_own else "in use" if is_held else "left",
                steps=folder.steps(),
                num_bytes=folder.num_bytes,
                age_s=max(0.0, time.time() - folder.folder.stat().st_mtime),
            )
        except OSError:
            continue  # another user's, or just removed
        yield folder, record


def _is_held(folder: MemoryFolder) -> bool:
    """Return whether a rank that trains holds the lock of this folder."""
    descriptor = os.open(folder.folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
