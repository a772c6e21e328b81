"""measure: all ways' ranks side by side, one step of each way in turn, round after round."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.peers.rank_processes import Answer, RankFailed, RankProcesses
from benchmarks.peers.results import Results

NUM_WARM_UP = 3
"""Steps before the first round: memory is allocated, DDP rebuilds its buckets, what is compiled is compiled."""
_TIMEOUT_S = 1200


class Program(NamedTuple):
    """What to start for a way."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str]


def measure(
    programs: Sequence[Program],
    folder: Path,
    num_ranks: int,
    results: Results,
    num_rounds: int,
    keep: Callable[[], None],
) -> None:
    """Add rounds to `results` until it has `num_rounds`; `keep` is called after each.

    A way that fails leaves its reason and is in no round. All ways train from the first step again, so the losses of
    the longest time that they ran are kept.
    """
    if len(results.rounds) >= num_rounds:
        return
    shutil.rmtree(folder / "runs", ignore_errors=True)
    with ExitStack() as stack:
        running: dict[str, RankProcesses] = {}
        losses: dict[str, list[float]] = {}
        for number, program in enumerate(programs):
            log = folder / f"way-{number}"
            processes = stack.enter_context(RankProcesses(program.command, program.variables, num_ranks, log))
            try:
                # One after the other: starting takes the cores for seconds.
                processes.wait_ready(_TIMEOUT_S)
                losses[program.name] = [_loss(processes.turn(_TIMEOUT_S)) for _ in range(NUM_WARM_UP)]
                running[program.name] = processes
            except RankFailed as failure:
                processes.close()
                results.failures[program.name] = str(failure)
        if not running:
            raise RankFailed("no way came to its first step: " + "; ".join(results.failures.values()))
        for number in range(len(results.rounds), num_rounds):
            results.rounds.append(_round(running, random.Random(number), losses, results))
            results.losses = {name: max(losses[name], results.losses.get(name, []), key=len) for name in running}
            keep()


def _round(
    running: dict[str, RankProcesses], order: random.Random, losses: dict[str, list[float]], results: Results
) -> dict[str, list[float]]:
    """Return one step of each way: [wall seconds of the slower rank, CPU seconds of all]."""
    found: dict[str, list[float]] = {}
    for name in order.sample(list(running), len(running)):
        answers = running[name].turn(_TIMEOUT_S)
        found[name] = [max(one["wall_s"] for one in answers), sum(one["cpu_s"] for one in answers)]
        losses[name].append(_loss(answers))
        results.peaks[name] = max(one["peak_bytes"] for one in answers)
    # In the order in which they started, whatever order they ran in.
    return {name: found[name] for name in running}


def _loss(answers: Iterable[Answer]) -> float:
    return fmean(one["loss"] for one in answers)
