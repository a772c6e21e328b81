"""output_folder: a new folder that is written next to its final name and renamed when it is complete."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshwright.checkpoint.format.durable import commit, remove, temporary_sibling
from meshwright.checkpoint.format.leftovers import hold, remove_leftovers
from meshwright.checkpoint.peers import GroupPeers
from meshwright.errors import CheckpointError, ConfigError
from meshwright.units import first_of, format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Replaceable:
    """The folders that --overwrite may replace."""

    is_one: Callable[[Path], bool]
    """Whether a folder is of the kind that the command writes."""
    files: re.Pattern[str]
    """Paths in the folder, with slashes, of all files that the command may have written."""

    def foreign_files(self, folder: Path) -> list[str]:
        """Return the paths in `folder` of all other files, links included."""
        paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
        return [name for name in names if self.files.fullmatch(name) is None]


def require_target(target: Path, verb: str, replaceable: Replaceable | None) -> None:
    """Raise ConfigError if `target` exists, unless it may be replaced; `replaceable` is None without --overwrite."""
    if not target.exists():
        return
    if replaceable is None:
        raise ConfigError(
            f"{target} exists, and {verb} replaces nothing without --overwrite: name a new folder, move it away, or "
            "give --overwrite"
        )
    if not target.is_dir() or not (replaceable.is_one(target) or not any(target.iterdir())):
        raise ConfigError(
            f"{target} is nothing that {verb} writes, so --overwrite does not replace it: name a new folder, or move "
            "it away"
        )
    if foreign := replaceable.foreign_files(target):
        raise ConfigError(
            f"{target} also holds {first_of(foreign)}, which {verb} does not write and --overwrite would remove: move "
            f"{'it' if len(foreign) == 1 else 'them'} elsewhere, or name a new folder"
        )


@dataclass(frozen=True)
class NewFolder:
    """A folder that is written by one or several ranks and has not got its final name yet."""

    target: Path
    """Its final name."""
    path: Path
    peers: GroupPeers
    """The ranks that write it."""

    def write(self, act: Callable[[], T], on_rank: int | None = None) -> T | None:
        """Return what `act` returns, run on every rank or only `on_rank`; every rank raises what any raises."""

        def explained() -> T:
            try:
                return act()
            except OSError as error:
                raise CheckpointError(
                    f"{self.target} could not be written ({error.strerror or error}), and was removed: free space "
                    "there, or name a folder that you may write"
                ) from error

        return self.peers.act_together(explained, on_rank)


@contextmanager
def output_folder(target: Path, num_bytes: int, peers: GroupPeers) -> Iterator[NewFolder]:
    """Yield an empty folder that becomes `target` at the end of the block, atomically; an older one is then removed.

    A `target` that is a link stays one: the folder that it points to is written. A collective of `peers`. On any error
    the new folder is removed and `target` is as it was. Raises CheckpointError if the disk has less than `num_bytes`
    free.
    """
    temporary, held = None, None
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    try:
        temporary = Path(peers.publish(peers.act_together(lambda: str(_make(target, num_bytes)), on_rank=0)))
        held = hold(temporary) if peers.rank == 0 else None
        folder = NewFolder(target, temporary, peers)
        yield folder
        folder.write(lambda: _put_in_place(folder.path, target), on_rank=0)
    finally:
        if temporary is not None and peers.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)


def _make(target: Path, num_bytes: int) -> Path:
    remove_leftovers(target)
    temporary = temporary_sibling(target)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written ({error.strerror or error}): name a folder that you may write"
        ) from error
    free = shutil.disk_usage(temporary).free
    if free < num_bytes:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{target} needs {format_bytes(num_bytes)}, and its disk has {format_bytes(free)} free: free space "
            "there, or name a folder on another disk"
        )
    return temporary


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        commit(temporary, target)
        return
    # Another kind, since it is no leftover until the new folder is in place.
    aside = target.rename(temporary_sibling(target, "old"))
    try:
        commit(temporary, target)
    except BaseException:
        aside.rename(target)
        raise
    remove(aside)
