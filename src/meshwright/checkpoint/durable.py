"""Making files and folders survive a crash: fsync, rename, and removal that is never seen half done."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from meshwright.log import logger

_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{32}")


def temporary_beside(folder: Path) -> Path:
    """Return a new name next to `folder` that no reader takes for a checkpoint."""
    return folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, as fsync of a file does for its bytes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a new file and return when its bytes are on disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def commit(temporary: Path, folder: Path) -> None:
    """Give the finished `temporary` its name: a crash leaves the old state or the new one, never a part."""
    fsync_folder(temporary)
    temporary.rename(folder)
    fsync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Remove `folder`; what cannot be removed is logged, since no valid checkpoint depends on it."""
    try:
        if _TEMPORARY.fullmatch(folder.name) is None:
            # By rename first, so that a half-deleted checkpoint never bears a checkpoint's name.
            folder = folder.rename(temporary_beside(folder))
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s): remove it by hand to free its space", folder, error.strerror)


def remove_stale(parent: Path) -> None:
    """Remove what saves and removals that were killed left in `parent`; no other save may be under way there."""
    for path in sorted(parent.iterdir()):
        if _TEMPORARY.fullmatch(path.name) is not None:
            logger.info("removing %s, left by a save that did not finish", path.name)
            remove(path)
