"""python -m benchmarks.compiled_blocks: what compiled blocks save on a processor; the loss and optimizer compiled too.

Two ranks of one thread share the state of llama-15m: 512 tokens a sequence, 2 sequences a microbatch, one microbatch a
rank. All ways are trainings of the trainer's own in the same processes and start from the same weights; a round runs a
step of each, in an order that changes, each after a barrier. Times are of the slower rank, medians over rounds, and
ratios medians of the ratios within a round. `loss` and `optimizer` are layout.compile_loss and compile_optimizer.

Expected, written down before measuring: blocks 1.1 times as fast as eager, since matmuls and attention are a library's
either way; the loss compiled 1.05 times as fast again; the optimizer no faster, being one fused kernel already.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.local.local_ranks import run_ranks
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training

NUM_RANKS = 2
WAYS = ("eager", "blocks", "blocks and loss", "blocks and optimizer")
JOB: dict[str, Any] = {
    "model": {"source": "llama-15m"},
    "train": {"seq_len": 512, "global_batch_size": 4, "steps": 1000},
    "layout": {"dp_shard": NUM_RANKS, "microbatch_size": 2},
    "run": {"device": "cpu"},
}
_NUM_WARM_UP = 2


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Timed steps of each way.")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), default=WAYS, help="Only these; default: all.")
def main(rounds: int, ways: tuple[str, ...]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**JOB, "data": {"source": str(_corpus(Path(folder))), "cache_dir": folder}}
        of_ranks = run_ranks(steps_of_ways, NUM_RANKS, job, list(ways), rounds, timeout_s=3600)
    slowest = {way: [max(times) for times in zip(*(one[way] for one in of_ranks), strict=True)] for way in ways}
    tokens = JOB["train"]["seq_len"] * JOB["train"]["global_batch_size"]
    table = Table("way", "step, ms", "tokens/s", f"times as fast as {ways[0]}", "first step, s", box=None)
    for way, (first_s, *steps_s) in slowest.items():
        median_s = statistics.median(steps_s)
        ratio = statistics.median(a / b for a, b in zip(slowest[ways[0]][1:], steps_s, strict=True))
        table.add_row(way, f"{median_s * 1e3:.0f}", f"{tokens / median_s:.0f}", f"{ratio:.3f}", f"{first_s:.1f}")
    Console().print(table)


def steps_of_ways(job: dict[str, Any], ways: list[str], rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds of each way's first step, then of each round's."""
    silence_known_warnings()
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trainings = {way: _training(job, way, ranks) for way in ways}
    found: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for number in range(-_NUM_WARM_UP, rounds):
        order = ways if number % 2 else ways[::-1]
        for way in order:
            training = trainings[way]
            step = number + _NUM_WARM_UP + 1
            microbatches = training.loader.microbatches(step - 1)
            dist.barrier()
            start_s = time.perf_counter()
            losses[way] = training.step(step, microbatches).loss
            took_s = time.perf_counter() - start_s
            if number >= 0 or number == -_NUM_WARM_UP:
                found[way].append(took_s)
        spread = max(losses.values()) - min(losses.values())
        assert spread < 1e-4 * max(losses.values()), f"the ways compute different losses: {losses}"
    for training in trainings.values():
        training.loader.close()
    return found


def _training(job: dict[str, Any], way: str, ranks: Ranks) -> Training:
    parts = {"compile_loss": "loss" in way, "compile_optimizer": "optimizer" in way}
    layout = {**job["layout"], "compile": way != "eager", **parts}
    return Training.build(Job.from_dict({**job, "layout": layout}), ranks)


def _corpus(folder: Path) -> Path:
    file = folder / "corpus.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}; the root of {n * n} is {n}.\n" for n in range(20_000)))
    return file


if __name__ == "__main__":
    sys.exit(main())
