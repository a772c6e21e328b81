"""in_background(): a function of many large things, computed by other processes while this one does something else.

The processes are forks, so that what they read is not copied to them; only results are. Where there is little to do, or
no fork, the results are computed here when they are asked for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Thing = TypeVar("Thing")
Result = TypeVar("Result")

LEAST_SIZE = 1_000_000
"""Records below which starting processes takes longer than they save."""

_task: tuple[Callable[[Any], Any], Sequence[Any]] | None = None
"""Of a process that this module forked."""


@contextmanager
def in_background(
    function: Callable[[Thing], Result], things: Sequence[Thing], size: int
) -> Iterator[Callable[[], list[Result]]]:
    """Yield a function that waits for and returns function(thing) of each of `things`, `size` records in all."""
    num_processes = min(os.cpu_count() or 1, len(things))
    if size < LEAST_SIZE or num_processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda: [function(thing) for thing in things]
        return
    with _blocking_sigterm():
        pool = multiprocessing.get_context("fork").Pool(num_processes, _take, (function, things))
    with pool:
        found = pool.map_async(_of_position, range(len(things)), chunksize=1)
        yield found.get


@contextmanager
def _blocking_sigterm() -> Iterator[None]:
    """What is forked meanwhile keeps a SIGTERM for later, until it has set its own handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take(function: Callable[[Any], Any], things: Sequence[Any]) -> None:
    global _task
    # A pool ends its processes with SIGTERM, at any time, which a handler that they inherit would swallow.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _task = function, things


def _of_position(position: int) -> Any:
    assert _task is not None
    function, things = _task
    return function(things[position])
