"""How long acts of checkpoints take, and steps of training meanwhile."""

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import distributed as dist

Times = dict[str, list[float]]
"""Seconds of each thing that is timed, one for each round."""
_WIDTH: Final = 1200
"""Side of the square matrices that a step multiplies, twenty times."""


def step_s(before_update: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of one step of this rank."""
    started_s = time.perf_counter()
    left = torch.ones(_WIDTH, _WIDTH)
    for _ in range(20):
        left = left @ left
        left /= _WIDTH
    before_update()
    return time.perf_counter() - started_s


def timed(times: Times, what: str, act: Callable[[], object]) -> None:
    """Add the seconds of an act that all ranks begin together; a collective."""
    dist.barrier()
    started_s = time.perf_counter()
    act()
    times[what].append(time.perf_counter() - started_s)
