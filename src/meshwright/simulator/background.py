"""in_background(): a function of several large items, computed by forked processes while this one continues.

Forks share the items without copying; only results are sent. With little work, or without fork, the results are
computed in this process when they are requested.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

LEAST_SIZE = 1_000_000
"""Records below which starting processes costs more time than it saves."""

_task: tuple[Callable[[Any], Any], Sequence[Any]] | None = None
"""The task of a process that this module forked."""


@contextmanager
def in_background(
    function: Callable[[Item], Result], items: Sequence[Item], size: int
) -> Iterator[Callable[[], list[Result]]]:
    """Yield a function that waits for and returns function(item) of each of `items`, `size` records in all."""
    num_processes = min(os.cpu_count() or 1, len(items))
    if size < LEAST_SIZE or num_processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda: [function(item) for item in items]
        return
    with _blocking_sigterm():
        pool = multiprocessing.get_context("fork").Pool(num_processes, _take, (function, items))
    with pool:
        found = pool.map_async(_of_position, range(len(items)), chunksize=1)
        yield found.get


@contextmanager
def _blocking_sigterm() -> Iterator[None]:
    """Block SIGTERM in processes forked meanwhile, until they have set their own handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _task
    # A pool terminates its processes with SIGTERM, which an inherited handler would ignore.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _task = function, items


def _of_position(position: int) -> Any:
    assert _task is not None
    function, items = _task
    return function(items[position])
