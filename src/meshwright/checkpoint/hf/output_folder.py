"""output_folder: a new folder that is written next to its final name and renamed when it is complete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.durable import commit, remove, temporary_sibling
from meshwright.errors import CheckpointError, ConfigError
from meshwright.units import first_of, format_bytes


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
            f"{target} exists, and {verb} never overwrites: name a new folder, move it away, or give --overwrite"
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


@contextmanager
def output_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` at the end of the block, atomically; an older one is then removed.

    On any error the new folder is removed and `target` is as it was. Raises CheckpointError if the disk has less than
    `num_bytes` free, or for an OSError in the block.
    """
    temporary = temporary_sibling(target)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written ({error.strerror or error}): name a folder that you may write"
        ) from error
    try:
        free = shutil.disk_usage(temporary).free
        if free < num_bytes:
            raise CheckpointError(
                f"{target} needs {format_bytes(num_bytes)}, and its disk has {format_bytes(free)} free: free space "
                "there, or name a folder on another disk"
            )
        yield temporary
        _put_in_place(temporary, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written ({error.strerror or error}), and was removed: free space "
            "there, or name a folder that you may write"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        commit(temporary, target)
        return
    aside = target.rename(temporary_sibling(target))
    try:
        commit(temporary, target)
    except OSError:
        aside.rename(target)
        raise
    remove(aside)
