"""Training steps with a mistake in each, for `meshwright simulate --build`: what it finds before anybody waits for it.

    meshwright simulate --build examples/planted_faults.py:ring_deadlock --ranks 4

Each builder takes (device, rank, world_size) and returns a step, which takes nothing. The step is plain torch: any
program that can be written this way can be tried.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

WIDTH = 256


def sound(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step without a mistake: gradients of two layers are summed over all ranks."""
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return step


def ring_deadlock(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which every rank waits for its neighbour's message before it sends its own."""
    model, x = _model(device)

    def step() -> None:
        received = torch.empty_like(x)
        dist.recv(received, (rank - 1) % world_size)
        dist.send(model(received), (rank + 1) % world_size)

    return step


def reversed_order(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which the last rank sums the gradients in another order than the others."""
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in reversed(gradients) if rank == world_size - 1 else gradients:
            dist.all_reduce(gradient)

    return step


def skipped_collective(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 1 believes that it has nothing to sum."""
    model, x = _model(device)

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        if rank != 1:
            dist.all_reduce(loss)

    return step


def _model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    with device:
        layers = (nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(*layers), torch.zeros(8, WIDTH)
