"""Operator costs in a training step, including host time before each operator.

    seconds = inside the operator + share x between the previous operator and this one

Profiling slows down what is between operators (Python, autograd, hooks, views), so only a share of it counts: the share
with which the samples of a step add up to the duration of a step without profiling. These are thread seconds, which
exclude other programs. The rest of a step's wall time is its collectives, waits included.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallelism.torch_private.torch_dispatch import (
    is_causal_attention,
    only_views,
    signature_of,
    tensors_in,
)
from meshwright.spec.trace.trace import Signature

_MOST_STEPS = 7
_NOT_RECORDED = ("profiler", "prim")
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class OpSample:
    """An operator on certain shapes, and its number in a step."""

    signature: Signature
    count: int
    mean_s: float
    """Mean seconds of one."""


@dataclass(frozen=True)
class ProfiledStep:
    """Operators and collectives of a step."""

    ops: list[OpSample]
    num_exchanges: int
    """Collectives; all but two small ones are all-gathers and reductions of FSDP."""
    exchanged_bytes: int
    """Bytes of their whole tensors."""
    exchanges_s: float
    """Wall seconds of the step minus its operators."""


def profiled_steps(
    build: str, jobs: Sequence[Sequence[str]], num_threads: int, duration_s: float
) -> list[ProfiledStep]:
    """Return the profiled step of each job on this rank; a collective over the existing process group.

    Takes about `duration_s`, at least a step per job. `build` is module:function of a builder that takes (device, rank,
    world_size, *arguments) and returns a step.
    """
    torch.set_num_threads(num_threads)
    module, _, function = build.partition(":")
    builder = getattr(importlib.import_module(module), function)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    profiled = []
    for job in jobs:
        step = builder(torch.device("cpu"), rank, num_ranks, *job)
        # The first step creates optimizer state.
        step()
        started_s = time.perf_counter()
        step()
        passed_s = time.perf_counter() - started_s
        profiled.append(profiled_step(step, _agreed(duration_s / len(jobs) / (2 * passed_s))))
    return profiled


def _agreed(wanted: float) -> int:
    """Return the number of steps that the slowest rank has time for; a collective."""
    count = torch.tensor(min(max(1, int(wanted)), _MOST_STEPS))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return int(count)


def profiled_step(step: Callable[[], object], num_steps: int) -> ProfiledStep:
    """Return the profile of a step, from `num_steps` with profiling and as many without."""
    watches, shares, walls_s = [], [], []
    for _ in range(num_steps):
        started_s, began_s = time.thread_time(), time.perf_counter()
        step()
        plain_s = time.thread_time() - started_s
        walls_s.append(time.perf_counter() - began_s)
        with torch.autograd.set_multithreading_enabled(False), _OpTimer() as watch:
            step()
        watches.append(watch)
        shares.append((plain_s - watch.inside_s) / watch.between_s)
    share = min(max(statistics.median(shares), 0.0), 1.0)
    first = watches[0]
    ops = [
        OpSample(first.signatures[key], len(rows), _median_s(watches, key, share)) for key, rows in first.rows.items()
    ]
    exchanges_s = statistics.median(walls_s) - sum(one.count * one.mean_s for one in ops)
    return ProfiledStep(ops, first.num_exchanges, first.exchanged_bytes, max(exchanges_s, 0.0))


def _median_s(watches: list[_OpTimer], key: Any, share: float) -> float:
    """Return the mean seconds of an operator in the median step."""
    return statistics.median(
        statistics.fmean(inside_s + share * between_s for inside_s, between_s in watch.rows[key])
        for watch in watches
        if key in watch.rows
    )


class _OpTimer(TorchDispatchMode):
    """Dispatch mode that times operators: `rows` are seconds (inside, between), by operator and shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        self.signatures: dict[Any, Signature] = {}
        self.inside_s, self.between_s = 0.0, 0.0
        self.num_exchanges, self.exchanged_bytes = 0, 0
        self._since_s = 0.0
        """Seconds since the last recorded operator."""
        self._ended_s = time.thread_time()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile does not run under other modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        started_s = time.thread_time()
        result = func(*args, **kwargs)
        ended_s = time.thread_time()
        if func.namespace in _NOT_RECORDED or only_views(func):
            self._pass(ended_s - self._ended_s)
        else:
            self._pass(started_s - self._ended_s)
            self._record((ended_s - started_s, self._since_s), func, args, kwargs, result)
            self._since_s = 0.0
        self._ended_s = time.thread_time()
        return result

    def _pass(self, took_s: float) -> None:
        self.between_s += took_s
        self._since_s += took_s

    def _record(self, took_s: tuple[float, float], func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.inside_s += took_s[0]
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if func.namespace in _COMMUNICATION:
            self.num_exchanges += 1
            self.exchanged_bytes += max((tensor.nbytes for tensor in (*inputs, *outputs)), default=0)
            return
        key = (func, len(inputs), *((tensor.dtype, tensor.shape) for tensor in (*inputs, *outputs)))
        if key not in self.signatures:
            self.signatures[key] = signature_of(
                func, inputs, outputs, is_causal=is_causal_attention(func, args, kwargs)
            )
        self.rows[key].append(took_s)
