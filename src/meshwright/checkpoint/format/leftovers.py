"""Temporary folders next to a target: locked while they are written, so that those of killed commands are known."""

import contextlib
import fcntl
import os
from pathlib import Path

from meshwright.checkpoint.format.durable import is_temporary_of, remove
from meshwright.log import logger


def hold(folder: Path) -> int:
    """Return a descriptor of `folder`, which is locked until it is closed; not on file systems without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of `target` that no process writes any more, and say so."""
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        return
    for path in sorted(target.parent.iterdir()):
        if not is_temporary_of(path, target):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # It has just been renamed or removed.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError as error:
            given = (path, error.strerror)
            logger.warning("%s cannot be locked (%s): remove it by hand unless a command still writes it", *given)
            continue
        finally:
            os.close(descriptor)
        if remove(path):
            logger.warning("removed %s, which a command that was stopped had left", path)
