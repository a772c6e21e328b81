"""run_ranks: one function on several local ranks, each a process of its own, and what each returned.

Importing torch takes seconds, so a fork server imports it once per caller and each rank is a fork of that: eight ranks
start, communicate and end in about a second. A rank has the caller's environment, working directory, module path and
warning filters.
"""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshwright.trainer.launch.local.local_rank_process import Failure, Order, rank_main
from meshwright.trainer.launch.local.rank_fork_server import fork_server, hidden_script, wait_for_processes
from meshwright.units import counted

# Ranks that wait for a failed one learn it from their closed connections; this is how long they get to say so.
_GRACE_S = 2.0
_NUM_OUTPUT_LINES = 40


class RanksFailed(Exception):
    """Ranks raised, died or never answered; the text has every rank's traceback, the first failure first."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason
        """Which rank failed first, and why, in a line or two."""


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60,
    device: str = "cpu",
    preload: tuple[str, ...] = (),
) -> list[Any]:
    """Return what `fn(*args)` returned on each rank, by rank; raises RanksFailed if one failed.

    `fn` is a function at the top level of a module; `args` and its result are pickled. The process group exists when it
    is called (gloo, and NCCL with device "cuda") and is destroyed afterwards. After `timeout_s` without an answer, the
    stacks of the ranks that are still busy are shown. No process is left behind, whatever happens. The first call's
    `preload` names modules that the fork server imports too.
    """
    started_s = time.monotonic()
    _require_named(fn)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        order = Order(fn.__module__, pickle.dumps((fn, args)), num_ranks, timeout_s, device, folder)
        ranks: list[_Rank] = []
        try:
            for number in range(num_ranks):
                ranks.append(_start(order, number, preload))
            if not _collect(ranks, timeout_s):
                _dump_stacks(ranks)
                raise _failure(ranks, time.monotonic() - started_s)
            return [pickle.loads(rank.result) for rank in ranks if rank.result is not None]
        finally:
            _kill(ranks)


@dataclass
class _Rank:
    """The caller's side of one rank."""

    number: int
    process: BaseProcess
    connection: Connection
    output: Path
    result: bytes | None = None
    failure: Failure | None = None
    failed_at_s: float = float("inf")

    @property
    def is_done(self) -> bool:
        return self.result is not None or self.failure is not None


def _require_named(fn: Callable[..., Any]) -> None:
    module = sys.modules.get(getattr(fn, "__module__", ""))
    name = getattr(fn, "__qualname__", "")
    if getattr(module, name, None) is not fn:
        raise TypeError(
            f"run_ranks got {name or fn!r}, which another process cannot find by its name: "
            "pass a function from the top level of a module, and what it needs as arguments"
        )


def _start(order: Order, number: int, preload: tuple[str, ...]) -> _Rank:
    context = fork_server(preload)
    ours, theirs = context.Pipe(duplex=False)
    output = Path(order.folder) / f"rank-{number}.log"
    process = context.Process(target=rank_main, args=(order, number, theirs, output), name=f"rank-{number}")
    with hidden_script() if order.module != "__main__" else contextlib.nullcontext():
        process.start()
    theirs.close()
    return _Rank(number, process, ours, output)


def _collect(ranks: Sequence[_Rank], timeout_s: float) -> bool:
    """Return whether all ranks answered well; on a failure the others get a moment to fail too."""
    deadline_s = time.monotonic() + timeout_s
    while busy := [rank for rank in ranks if not rank.is_done]:
        failed_at_s = min(rank.failed_at_s for rank in ranks)
        left_s = min(deadline_s, failed_at_s + _GRACE_S) - time.monotonic()
        if left_s <= 0:
            return False
        ready = wait_for_processes([end for rank in busy for end in (rank.connection, rank.process.sentinel)], left_s)
        for rank in busy:
            if rank.connection in ready or rank.process.sentinel in ready:
                _receive(rank)
    return all(rank.failure is None for rank in ranks)


def _receive(rank: _Rank) -> None:
    try:
        answer = rank.connection.recv() if rank.connection.poll() else None
    except EOFError:
        answer = None
    if isinstance(answer, bytes):
        rank.result = answer
        return
    rank.failed_at_s = time.monotonic()
    rank.failure = answer if isinstance(answer, Failure) else _death(rank.process)


def _death(process: BaseProcess) -> Failure:
    process.join(_GRACE_S)
    code = process.exitcode
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    return Failure(f"{how} before it returned\n", how)


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Ask the ranks that are still busy where they are; the answer is in their output."""
    for rank in ranks:
        if not rank.is_done and rank.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _failure(ranks: Sequence[_Rank], took_s: float) -> RanksFailed:
    failed = sorted((rank for rank in ranks if rank.failure is not None), key=lambda rank: rank.failed_at_s)
    stuck = [rank for rank in ranks if not rank.is_done]
    summary = f"{counted(len(ranks), 'rank')}, after {took_s:.1f} s: {len(failed)} failed, {len(stuck)} still busy"
    if not failed:
        summary += " at the timeout"
    lines = [summary]
    for place, rank in enumerate(failed):
        assert rank.failure is not None
        lines.append(f"\n--- rank {rank.number} failed{' first' if place == 0 else ''} ---\n{rank.failure.traceback}")
        lines.append(_output_tail(rank))
    for rank in stuck:
        lines.append(f"\n--- rank {rank.number} was still busy, here ---\n{_output_tail(rank)}")
    first = failed[0].failure if failed else None
    return RanksFailed("\n".join(lines), summary if first is None else f"rank {failed[0].number}: {first.reason}")


def _output_tail(rank: _Rank) -> str:
    text = rank.output.read_text(errors="replace") if rank.output.exists() else ""
    return "\n".join(text.splitlines()[-_NUM_OUTPUT_LINES:])


def _kill(ranks: Sequence[_Rank]) -> None:
    """End every rank, and whatever it started: a rank leads a process group of its own."""
    for rank in ranks:
        if rank.result is not None:
            rank.process.join(_GRACE_S)
        rank.process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid or 0, signal.SIGKILL)
    for rank in ranks:
        wait_for_processes([rank.process.sentinel])
        rank.process.join()
        rank.process.close()
        rank.connection.close()
