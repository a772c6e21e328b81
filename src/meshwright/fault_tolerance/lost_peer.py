"""Classification of errors: a lost peer or a bug. Backends report both as RuntimeError."""

import re

from torch import distributed as dist

from meshwright.channels.key_value import StoreLost
from meshwright.errors import ExitCode, MeshwrightError

# Messages of gloo, NCCL and the store for a lost peer (torch 2.13, 2026-11-20).
_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "failed to connect",
    "connectFullMesh failed",
    "Timed out waiting",
    "Wait timeout",
    "Timeout waiting for key",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` means that another rank, or the connection to it, is lost."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | StoreLost):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def words_of(error: BaseException) -> str:
    """Return the first sentence of a backend's error, without its advice."""
    return re.split(r"\. (?=[A-Z])", str(error).strip().splitlines()[0], maxsplit=1)[0].rstrip(".")


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code from which a scheduler decides whether to retry after `error`."""
    if isinstance(error, MeshwrightError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.RETRY if is_lost_peer(error) else ExitCode.DO_NOT_RETRY
