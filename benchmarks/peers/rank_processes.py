"""RankProcesses: the two ranks of a way, alive from their start to `close`, one step in each turn."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

from benchmarks.peers.turns import ANSWERS, ORDERS

Answer = dict[str, float]


class RankFailed(Exception):
    """A rank ended or said nothing; the text is the last of what it printed."""


class _Rank(NamedTuple):
    process: subprocess.Popen[bytes]
    orders: TextIO
    answers: TextIO
    log: Path


class RankProcesses:
    """Processes that `command` starts, with torchrun's variables; each uses turns.Turns."""

    def __init__(self, command: tuple[str, ...], variables: Mapping[str, str], num_ranks: int, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        common |= {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._ranks: list[_Rank] = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(_start(command, {**variables, **common, **own}, log.with_suffix(f".{rank}.log")))

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all ranks have come to their first step; raises RankFailed."""
        self._answers(timeout_s)

    def turn(self, timeout_s: float) -> list[Answer]:
        """Let all ranks take one step and return what each measured; raises RankFailed."""
        for rank in self._ranks:
            try:
                rank.orders.write("next\n")
                rank.orders.flush()
            except BrokenPipeError:
                raise _failure(rank, "ended") from None
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[Answer]:
        deadline_s = time.monotonic() + timeout_s
        return [_answer(rank, deadline_s - time.monotonic()) for rank in self._ranks]

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()
            rank.answers.close()
            try:
                rank.orders.close()
            except BrokenPipeError:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _start(command: tuple[str, ...], variables: Mapping[str, str], log: Path) -> _Rank:
    (order_end, orders), (answers, answer_end) = os.pipe(), os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**variables, ORDERS: str(order_end), ANSWERS: str(answer_end)},
            pass_fds=(order_end, answer_end),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    os.close(order_end)
    os.close(answer_end)
    return _Rank(process, os.fdopen(orders, "w"), os.fdopen(answers, "r"), log)


def _answer(rank: _Rank, timeout_s: float) -> Answer:
    ready, _, _ = select.select([rank.answers], [], [], max(timeout_s, 0))
    if not ready:
        raise _failure(rank, "said nothing in time")
    if not (line := rank.answers.readline()):
        raise _failure(rank, f"ended with code {rank.process.wait()}")
    answer: Answer = json.loads(line)
    return answer


def _failure(rank: _Rank, how: str) -> RankFailed:
    lines = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-30:]), file=sys.stderr)
    return RankFailed(f"{how}: {lines[-1].strip() if lines else 'no output'}")
