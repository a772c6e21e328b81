"""measure(): everything that one rank times, as plain numbers that can be sent to whoever writes the file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import distributed as dist

from meshwright.calibrator.communication import collective_seconds
from meshwright.calibrator.kernels import attention_seconds, matmul_seconds
from meshwright.calibrator.memory_ops import memory_op_seconds
from meshwright.calibrator.menu import Menu
from meshwright.calibrator.timing import Stopwatch
from meshwright.calibrator.tiny_step import BlockStep, block_step_seconds, host_seconds
from meshwright.spec.machine.measured import CollectiveKind, MemoryOp

_NUM_ROUNDS = 3
# How long ranks of a processor wait for each other is chance, and its mean is several times its least (2 ranks on 2
# cores that gather 256 KiB, 2026-11-21: 0.2 ms at least, 1.1 ms in the mean). Of a step's hundreds the mean matters.
_MANY_WAITS_S = 0.1


@dataclass(frozen=True)
class Measurements:
    """Seconds by what took them; see kernels.py, memory_ops.py, communication.py and tiny_step.py."""

    matmul_s: dict[tuple[str, int, int, int], float]
    forward_attention_s: dict[tuple[str, int, int], float]
    backward_attention_s: dict[tuple[str, int, int], float]
    forward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    backward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    collective_s: dict[tuple[CollectiveKind, int, int], float]
    """Of all ranks and of parts of them; empty with one rank, and so is:"""
    block_step_s: dict[tuple[BlockStep, int], float]
    host_s: dict[str, float]
    """Of a "kernel" of an eager model."""


def measure(device_type: str, menu: Menu, duration_s: float, num_threads: int) -> Measurements:
    """Return what this rank measured in about `duration_s`; a collective over a process group that exists.

    All ranks measure the same at the same time, each with `num_threads` of the processor, as they would train. The menu
    is gone through several times. Of what one rank does the best is kept: another program can slow it, never speed it.
    Of what ranks do together the median is: they can also be lucky.
    """
    torch.set_num_threads(num_threads)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    watch = Stopwatch(device, duration_s / menu.num_points / _NUM_ROUNDS)
    rounds = [_round(menu, watch) for _ in range(_NUM_ROUNDS)]
    best, usual = _combine(rounds, min), _combine(rounds, statistics.median)
    return replace(best, collective_s=usual.collective_s, block_step_s=usual.block_step_s)


def mean_of(ranks: Sequence[Measurements]) -> Measurements:
    """Return the mean over ranks of each measurement; they are of the same sizes."""
    return _combine(ranks, statistics.fmean)


def _round(menu: Menu, watch: Stopwatch) -> Measurements:
    own = together = watch
    if watch.device.type == "cpu":
        own = replace(watch, clock=time.thread_time)
        together = replace(watch, shortest_sample_s=_MANY_WAITS_S)
    attention = attention_seconds(menu, own)
    memory_ops = memory_op_seconds(menu, own)
    has_peers = dist.get_world_size() > 1
    return Measurements(
        matmul_s=matmul_seconds(menu, own),
        forward_attention_s={at: forward for at, (forward, _) in attention.items()},
        backward_attention_s={at: backward for at, (_, backward) in attention.items()},
        forward_memory_op_s={at: forward for at, (forward, _) in memory_ops.items()},
        backward_memory_op_s={at: back for at, (_, back) in memory_ops.items() if back is not None},
        collective_s=collective_seconds(menu, together) if has_peers else {},
        block_step_s=block_step_seconds(menu.block_widths, together) if has_peers else {},
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
