"""Tells a lost peer from a bug: backends report both as RuntimeError."""

import re

from torch import distributed as dist

from meshwright.errors import ExitCode, MeshwrightError

# What gloo, NCCL and the store say when the other side is gone (read off torch 2.13 on 2026-11-20).
_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "failed to connect",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` means that another rank, or the way to it, is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def words_of(error: BaseException) -> str:
    """Return what a backend says is wrong: its first sentence, without its advice."""
    return re.split(r"\. (?=[A-Z])", str(error).strip().splitlines()[0], maxsplit=1)[0].rstrip(".")


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code that tells a scheduler what `error` means for the next try."""
    if isinstance(error, MeshwrightError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.RETRY if is_lost_peer(error) else ExitCode.DO_NOT_RETRY
