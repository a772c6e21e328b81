"""MemoryFolder: where the copies of one run lie on one node, and whose they are; needs no torch."""

import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from meshwright.checkpoint.format.durable import remove, remove_stale, temporary_sibling
from meshwright.checkpoint.format.leftovers import hold
from meshwright.spec.frozen import Frozen
from meshwright.spec.run.run import Run

_PREFIX = "meshwright-"
_OWNER = "owner.json"


class MemoryOwner(Frozen):
    """The run that a folder of copies in memory belongs to."""

    id: str
    """Random id of the run's copies, also in the run folder; a run that replaces another has its own."""
    run: str
    """The run folder."""


class MemoryFolder:
    """The copies of one run in the memory of this node: folders step-N with some ranks' files of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def open(self, owner: MemoryOwner) -> None:
        """Make the folder, for this user alone, and hold its lock while this process lives; raises OSError."""
        self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._lock = hold(self.folder)
        _replace(self.folder / _OWNER, owner)
        remove_stale(self.folder)

    @property
    def identity(self) -> str:
        """Return a text that is equal for containers of one machine which share this folder, and for no others."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            boot = socket.gethostname()
        found = self.folder.stat()
        return f"{boot} {found.st_dev} {found.st_ino}"

    @property
    def owner(self) -> MemoryOwner | None:
        """Return whose copies these are; None where the folder does not say."""
        return _read(self.folder / _OWNER)

    def copy(self, step: int) -> Path:
        """Return the folder of the copy after `step`."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a copy, or a part of one, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def remove_copies(self, but: int | None = None) -> None:
        """Remove all copies, but that after step `but`."""
        for step in self.steps():
            if step != but:
                remove(self.copy(step))

    def remove(self) -> bool:
        """Remove the folder and return whether it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()
        return not self.folder.exists()

    def release(self) -> None:
        """Give up the lock that `open` took."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def memory_parent(memory_dir: str) -> Path:
    """Return the folder that checkpoint.memory_dir names on this node."""
    return Path(memory_dir.replace("{host}", socket.gethostname()))


def memory_folder(memory_dir: str, owner_id: str) -> MemoryFolder:
    """Return the folder on this node for the copies of the run whose id is `owner_id`."""
    return MemoryFolder(memory_parent(memory_dir) / f"{_PREFIX}{owner_id}")


def memory_folders(memory_dir: str) -> Iterator[MemoryFolder]:
    """Yield the folders of all runs that have copies on this node."""
    parent = memory_parent(memory_dir)
    for path in sorted(parent.glob(f"{_PREFIX}*")) if parent.is_dir() else []:
        if (path / _OWNER).is_file():
            yield MemoryFolder(path)


def owner_of(run: Run) -> MemoryOwner | None:
    """Return the id of the copies of `run`; None where it has none yet."""
    return _read(run.memory_owner)


def new_owner(run: Run) -> MemoryOwner:
    """Write a new id into the run folder and return it, so that no earlier copy is taken for this run's."""
    owner = MemoryOwner(id=uuid.uuid4().hex, run=str(run.folder.absolute()))
    _replace(run.memory_owner, owner)
    return owner


def is_orphan(folder: MemoryFolder) -> bool:
    """Return whether the run of these copies is gone from this machine's sight, or has begun again with others."""
    owner = folder.owner
    if owner is None:
        return False
    current = owner_of(Run(owner.run))
    return current is None or current.id != owner.id


def _replace(path: Path, owner: MemoryOwner) -> None:
    temporary = temporary_sibling(path)
    temporary.write_text(owner.to_json(), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> MemoryOwner | None:
    with suppress(OSError, ValidationError, ValueError):
        return MemoryOwner.from_json(path.read_text(encoding="utf-8"))
    return None
