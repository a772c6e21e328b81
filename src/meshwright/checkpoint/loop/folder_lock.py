"""FolderLock: one program at a time saves into a folder."""

import fcntl
import os

from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.run.run import Run


class FolderLock:
    """The lock of a folder of checkpoints, which ends with this process at the latest."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Hold the folder from now on; raises ConfigError while another process does."""
        if self._descriptor is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._folder, os.O_RDONLY)
        except OSError:
            return  # The save that follows says what is wrong with the folder.
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"another process saves into {self._folder}: wait until it has ended, or choose another folder"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): let no other process save into it", self._folder, error.strerror)

    def release(self) -> None:
        """Let others have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
