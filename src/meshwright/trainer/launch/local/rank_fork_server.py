"""Fork server with torch and the package's run half imported, from which local ranks are forked; imports no torch.

There is one server for each process that starts ranks; it ends with that process, or with its last rank.
"""

import atexit
import functools
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Self, cast

_PRELOAD = "meshwright.trainer.launch.local.preload"
_SETTINGS = {
    # Threads do not survive a fork, so the server must start none; a rank sets its own number.
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait make a step several times slower as soon as anything else runs
    # (2 cores, two busy neighbours, 2026-11-20: median step 976 ms spinning, 480 ms passive).
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What libraries read when they are loaded, which a rank that is forked cannot change; the user's values win."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKE_EVERY_S = 1.0


def fork_server(preload: tuple[str, ...] = ()) -> ForkServerContext:
    """Return the context whose server has torch and the package's run half imported, and start it to import them.

    Returns at once; a process that is started before the server is ready waits for it, and so it would for one that is
    frozen (SIGSTOP), which is woken. The first call's `preload` names modules that the server imports too.
    """
    context = _started_server(preload)
    _wake_server()
    return context


@functools.cache
def _started_server(preload: tuple[str, ...]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD, *preload])
    # It changes the signal mask, so that it has to exist before.
    resource_tracker.ensure_running()
    with _environment(_SETTINGS), _blocked_signals():
        forkserver.ensure_running()
    atexit.register(_end_server, os.getpid())
    return context


def wait_for_processes(objects: Sequence[int | Connection], within_s: float | None = None) -> list[int | Connection]:
    """Return those of `objects` that are ready, as multiprocessing.connection.wait does, sentinels of ranks among them.

    Only the server learns that a rank has ended. Where it is frozen it is woken, and again while this waits.
    """
    deadline_s = math.inf if within_s is None else time.monotonic() + within_s
    while True:
        _wake_server()
        left_s = max(0.0, deadline_s - time.monotonic())
        ready = cast("list[int | Connection]", wait(objects, min(left_s, _WAKE_EVERY_S)))
        if ready or left_s <= _WAKE_EVERY_S:
            return ready


def _wake_server() -> None:
    pid = _server_pid()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _server_pid() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _end_server(owner: int) -> None:
    """End the server of this process, which has no ranks any more, and may still import what no rank will need."""
    pid = _server_pid()
    if pid is None or os.getpid() != owner:
        return
    # By itself it ends a moment after this process, holds the pipe of its output open until then, and remains
    # as a zombie where process 1 does not wait for it.
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def hidden_script() -> Iterator[None]:
    """Keep a process that starts from importing the caller's script: without a __main__ guard it would run again."""
    script = sys.modules["__main__"]
    kept: dict[str, Any] = {name: vars(script).pop(name) for name in ("__file__", "__spec__") if name in vars(script)}
    script.__spec__ = None
    try:
        yield
    finally:
        vars(script).update(kept)


class SentDescriptor:
    """A file descriptor that a process which is being started receives, as a duplicate, under another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return SentDescriptor._received, (DupFd(self.number),)

    @classmethod
    def _received(cls, sent: Any) -> Self:
        return cls(sent.detach())

    def replace(self, number: int) -> None:
        """Let `number` refer to this file, and close this descriptor."""
        os.dup2(self.number, number)
        os.close(self.number)


def accept_signals() -> None:
    """Let a forked rank receive the signals that its server blocks; one that was sent meanwhile arrives now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def wait_for_caller() -> None:
    """Return when the process that had this rank forked, which is not its parent, has ended."""
    _caller().join()


def caller_has_ended() -> bool:
    """Return whether the process that had this rank forked is gone."""
    return not _caller().is_alive()


def _caller() -> BaseProcess:
    caller = multiprocessing.parent_process()
    assert caller is not None
    return caller


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Have the server, which inherits the mask, survive a Ctrl-C or a SIGTERM of its whole process group.

    Only it learns how ranks ended, and ranks are stopped by their launcher.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
