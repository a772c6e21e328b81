"""measure_axis: the step times of all ways of one axis, in rounds that each run every way once."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist

from benchmarks.axis_overhead import ours, pipeline_by_hand, sharded_by_hand, tensor_by_hand, torch_way
from benchmarks.axis_overhead.workload import NUM_RANKS, SIZES, Step, Workload
from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.trainer.launch.local.local_ranks import run_ranks

NUM_WARMUP_ROUNDS = 3
PARITY_BAR = 1e-5
"""How far losses may differ, relative: rounding that all steps so far have added up, and no mistake that matters."""
_TIMEOUT_S = 900

_BY_HAND: dict[str, Callable[[Workload], Step]] = {"tp": tensor_by_hand.build, "pp": pipeline_by_hand.build}
_TORCH: dict[str, Callable[[Workload], Step]] = {
    "dp_shard": torch_way.fully_sharded,
    "dp_replicate": torch_way.replicated,
    "tp": torch_way.tensor_parallel,
    "pp": torch_way.pipelined,
}


@dataclass
class _Timed:
    """One way's steps after the warmup, on this rank or on the slowest; and the losses of all steps."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """What this process computed in the meantime: hardly changed by what else runs here, and blind to waiting."""
    losses: list[float] = field(default_factory=list)


def measure_axis(axis: str, size: str, num_rounds: int) -> dict[str, Any]:
    """Return the figures of one axis, as JSON: medians in ms, ratios of the same round, and how far losses differ.

    Raises ArithmeticError when the ways do not compute the same.
    """
    of_ranks = run_ranks(_on_a_rank, NUM_RANKS, axis, size, num_rounds, timeout_s=_TIMEOUT_S)
    ways = {name: _slowest([ways[name] for ways in of_ranks]) for name in of_ranks[0]}
    by_hand = ways["by hand"]
    difference = max(
        abs(one - other) / abs(other)
        for timed in ways.values()
        for one, other in zip(timed.losses, by_hand.losses, strict=True)
    )
    if not difference <= PARITY_BAR:
        losses = {name: timed.losses for name, timed in ways.items()}
        raise ArithmeticError(f"{axis}: losses differ by {difference:.1e} of their size, not the same work: {losses}")
    return {
        "axis": axis,
        "size": size,
        "rounds": num_rounds,
        "loss_difference": difference,
        "ms": {name: statistics.median(timed.step_s) * 1e3 for name, timed in ways.items()},
        "cpu_ms": {name: statistics.median(timed.cpu_s) * 1e3 for name, timed in ways.items()},
        "ratio": {name: _ratio(timed.step_s, by_hand.step_s) for name, timed in ways.items()},
        "cpu_ratio": {name: _ratio(timed.cpu_s, by_hand.cpu_s) for name, timed in ways.items()},
    }


def _on_a_rank(axis: str, size: str, num_rounds: int) -> dict[str, _Timed]:
    silence_known_warnings()
    work = Workload.of(axis, SIZES[size])
    our_step, batches = ours.build(work, NUM_WARMUP_ROUNDS + num_rounds)
    ways = {"ours": our_step, "by hand": _BY_HAND.get(axis, sharded_by_hand.build)(work)}
    if axis in _TORCH:
        ways["torch"] = _TORCH[axis](work)
    timed = {name: _Timed() for name in ways}
    gc.collect()
    for number, batch in enumerate(batches):
        # Another one is first in each round: what a step leaves behind in caches is then nobody's alone.
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            loss = ways[name](batch)
            ended = time.perf_counter(), time.process_time()
            assert math.isfinite(loss)
            timed[name].losses.append(loss)
            if number >= NUM_WARMUP_ROUNDS:
                timed[name].step_s.append(ended[0] - started[0])
                timed[name].cpu_s.append(ended[1] - started[1])
    return timed


def _slowest(of_ranks: list[_Timed]) -> _Timed:
    step_s = [max(times) for times in zip(*(one.step_s for one in of_ranks), strict=True)]
    cpu_s = [max(times) for times in zip(*(one.cpu_s for one in of_ranks), strict=True)]
    return _Timed(step_s, cpu_s, of_ranks[0].losses)


def _ratio(times: list[float], by_hand: list[float]) -> float:
    """Return the median of the ratios of the same round."""
    return statistics.median(one / other for one, other in zip(times, by_hand, strict=True))
