"""Crash-safe files and folders: fsync, atomic rename, and removal by rename."""

import os
import re
import shutil
import uuid
from pathlib import Path

from meshwright.log import logger

_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{32}")


def temporary_sibling(folder: Path, kind: str = "tmp") -> Path:
    """Return a new path NAME.KIND-ID in the parent of `folder`."""
    return folder.with_name(f"{folder.name}.{kind}-{uuid.uuid4().hex}")


def is_temporary_of(path: Path, folder: Path) -> bool:
    """Return whether `path` has a name that `temporary_sibling` gives for `folder`."""
    return _TEMPORARY.fullmatch(path.name) is not None and path.name.rpartition(".tmp-")[0] == folder.name


def fsync_folder(folder: Path) -> None:
    """Make the directory entries of `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a new file durably."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def commit(temporary: Path, folder: Path) -> None:
    """Rename the complete folder `temporary` to `folder`, atomically and durably."""
    fsync_folder(temporary)
    temporary.rename(folder)
    fsync_folder(folder.parent)


def remove(folder: Path) -> bool:
    """Remove `folder` and return whether it is gone; log a failure, since no valid checkpoint depends on it."""
    try:
        if _TEMPORARY.fullmatch(folder.name) is None:
            # Renamed first, so that no partly deleted folder has the name of a checkpoint.
            folder = folder.rename(temporary_sibling(folder))
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s): remove it by hand to free its space", folder, error.strerror)
        return False
    return True


def remove_stale(parent: Path) -> None:
    """Remove leftovers of killed saves and removals in `parent`, where no other save may be running."""
    for path in sorted(parent.iterdir()):
        if _TEMPORARY.fullmatch(path.name) is not None:
            logger.info("removing %s, left by a save that did not finish", path.name)
            remove(path)
