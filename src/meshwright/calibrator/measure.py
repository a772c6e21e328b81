"""All measurements of one rank, as plain numbers that can be sent to rank 0."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import distributed as dist

from meshwright.calibrator.collective_timings import collective_seconds
from meshwright.calibrator.kernels import attention_seconds, matmul_seconds, memory_op_seconds
from meshwright.calibrator.size_grid import SizeGrid
from meshwright.calibrator.timing import Stopwatch
from meshwright.calibrator.tiny_step import BlockStep, block_step_seconds, host_seconds
from meshwright.spec.machine.measured import CollectiveKind, MemoryOp

_NUM_ROUNDS = 3
# Waits between ranks of a CPU are random, with a mean of several times the minimum (all-gather of 256 KiB by 2 ranks on
# 2 cores, 2026-11-21: minimum 0.2 ms, mean 1.1 ms). A step has hundreds of waits, so the mean matters.
_MANY_WAITS_S = 0.1


@dataclass(frozen=True)
class Measurements:
    """Seconds by operation and size; see kernels.py, collective_timings.py and tiny_step.py."""

    matmul_s: dict[tuple[str, int, int, int], float]
    forward_attention_s: dict[tuple[str, int, int], float]
    backward_attention_s: dict[tuple[str, int, int], float]
    forward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    backward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    collective_s: dict[tuple[CollectiveKind, int, int], float]
    """Of all ranks and of subgroups; empty with one rank, like block_step_s."""
    block_step_s: dict[tuple[BlockStep, int], float]
    host_s: dict[str, float]
    """Host seconds per kernel of an eager model, under "kernel"."""


def measure(device_type: str, sizes: SizeGrid, duration_s: float, num_threads: int) -> Measurements:
    """Return this rank's measurements, taken in about `duration_s`; a collective over an existing process group.

    All ranks measure the same sizes at the same time, each with `num_threads` CPU threads, as in training, in several
    rounds. Single-rank measurements keep the minimum, since noise only adds time; collectives keep the median.
    """
    torch.set_num_threads(num_threads)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    watch = Stopwatch(device, duration_s / sizes.num_points / _NUM_ROUNDS)
    rounds = [_round(sizes, watch) for _ in range(_NUM_ROUNDS)]
    best, usual = _combine(rounds, min), _combine(rounds, statistics.median)
    return replace(best, collective_s=usual.collective_s, block_step_s=usual.block_step_s)


def mean_of(ranks: Sequence[Measurements]) -> Measurements:
    """Return the mean of each measurement over ranks."""
    return _combine(ranks, statistics.fmean)


def _round(sizes: SizeGrid, watch: Stopwatch) -> Measurements:
    own = together = watch
    if watch.device.type == "cpu":
        own = replace(watch, clock=time.thread_time)
        together = replace(watch, shortest_sample_s=_MANY_WAITS_S)
    attention = attention_seconds(sizes, own)
    memory_ops = memory_op_seconds(sizes, own)
    has_peers = dist.get_world_size() > 1
    return Measurements(
        matmul_s=matmul_seconds(sizes, own),
        forward_attention_s={at: forward for at, (forward, _) in attention.items()},
        backward_attention_s={at: backward for at, (_, backward) in attention.items()},
        forward_memory_op_s={at: forward for at, (forward, _) in memory_ops.items()},
        backward_memory_op_s={at: back for at, (_, back) in memory_ops.items() if back is not None},
        collective_s=collective_seconds(sizes, together) if has_peers else {},
        block_step_s=block_step_seconds(sizes.block_widths, together) if has_peers else {},
        host_s={"kernel": host_seconds(own)},
    )


def _combine(several: Sequence[Measurements], combine: Callable[[list[float]], float]) -> Measurements:
    return Measurements(
        **{
            field.name: {
                at: combine([getattr(one, field.name)[at] for one in several]) for at in getattr(several[0], field.name)
            }
            for field in fields(Measurements)
        }
    )
