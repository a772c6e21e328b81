"""WatchedStep: what operators cost in a step of training, the host's seconds before each of them included.

    seconds = inside the operator + share x between the one before and this one

Watching makes what lies between operators (Python, autograd, hooks, views) take longer, so of that only a share counts:
the one with which the samples of a step add up to what it takes unwatched. All are seconds of the thread, which stand
still while another program has the core. What a step takes by the wall's clock besides is that of its exchanges, waits
included.
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
    """An operator on tensors of certain shapes, as often as a step has it."""

    signature: Signature
    count: int
    mean_s: float
    """Of one of them, in the mean of a step."""


@dataclass(frozen=True)
class WatchedStep:
    """What a step is made of."""

    ops: list[OpSample]
    num_exchanges: int
    """Collectives, all of them those of sharded parameters and gradients but for two small ones."""
    exchanged_bytes: int
    """Of their whole tensors."""
    exchanges_s: float
    """Seconds of the step next to its operators."""


def watched_steps(build: str, jobs: Sequence[Sequence[str]], num_threads: int, duration_s: float) -> list[WatchedStep]:
    """Return what a step of each job is made of on this rank; a collective over the group that exists.

    It takes about `duration_s`, or a step of each job. `build` names a builder, as module:function, that takes (device,
    rank, world_size, *arguments) and returns a step.
    """
    torch.set_num_threads(num_threads)
    module, _, function = build.partition(":")
    builder = getattr(importlib.import_module(module), function)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    watched = []
    for job in jobs:
        step = builder(torch.device("cpu"), rank, num_ranks, *job)
        # The first makes the optimizer's state.
        step()
        started_s = time.perf_counter()
        step()
        passed_s = time.perf_counter() - started_s
        watched.append(watched_step(step, _agreed(duration_s / len(jobs) / (2 * passed_s))))
    return watched


def _agreed(wanted: float) -> int:
    """Return how many steps the slowest rank has time for: all run the same."""
    count = torch.tensor(min(max(1, int(wanted)), _MOST_STEPS))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return int(count)


def watched_step(step: Callable[[], object], num_steps: int) -> WatchedStep:
    """Return what a step is made of, from `num_steps` that are watched and as many that are not."""
    watches, shares, walls_s = [], [], []
    for _ in range(num_steps):
        started_s, began_s = time.thread_time(), time.perf_counter()
        step()
        plain_s = time.thread_time() - started_s
        walls_s.append(time.perf_counter() - began_s)
        with torch.autograd.set_multithreading_enabled(False), _Watch() as watch:
            step()
        watches.append(watch)
        shares.append((plain_s - watch.inside_s) / watch.between_s)
    share = min(max(statistics.median(shares), 0.0), 1.0)
    first = watches[0]
    ops = [
        OpSample(first.signatures[key], len(rows), _usual_s(watches, key, share)) for key, rows in first.rows.items()
    ]
    beside_s = statistics.median(walls_s) - sum(one.count * one.mean_s for one in ops)
    return WatchedStep(ops, first.num_exchanges, first.exchanged_bytes, max(beside_s, 0.0))


def _usual_s(watches: list[_Watch], key: Any, share: float) -> float:
    """Return the mean seconds of the operator in the median step."""
    return statistics.median(
        statistics.fmean(inside_s + share * between_s for inside_s, between_s in watch.rows[key])
        for watch in watches
        if key in watch.rows
    )


class _Watch(TorchDispatchMode):
    """Times what is dispatched: `rows` are seconds (inside, between) of each operator, by operator and shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        self.signatures: dict[Any, Signature] = {}
        self.inside_s, self.between_s = 0.0, 0.0
        self.num_exchanges, self.exchanged_bytes = 0, 0
        self._since_s = 0.0
        """Between the last operator that asked something of the device and now."""
        self._ended_s = time.thread_time()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile refuses to run below other modes."""
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
