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


def missing_barrier(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 1 leaves out the barrier before the gradients are summed."""
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        if rank != 1:
            dist.barrier()
        dist.all_reduce(model[0].weight.grad)

    return step


def other_root(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which the last rank takes rank 1 for the source of a broadcast."""
    _, x = _model(device)

    def step() -> None:
        dist.broadcast(x, src=1 if rank == world_size - 1 else 0)

    return step


def other_reduction(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 1 takes the maximum where the others take the mean."""
    model, x = _model(device)

    def step() -> None:
        loss = model(x).mean()
        loss.backward()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.AVG)

    return step


def unequal_splits(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 0 expects more rows of rank 1 than that sends."""
    _, x = _model(device)

    def step() -> None:
        sent, received = [2] * world_size, [2] * world_size
        if rank == 0:
            received[1] = 3
        output = x.new_empty(sum(received), WIDTH)
        dist.all_to_all_single(output, x.new_zeros(sum(sent), WIDTH), received, sent)

    return step


def cpu_tensors(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 2 does not report its number of tokens, which is on the host."""
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        num_tokens = torch.ones(1, dtype=torch.int64)
        if rank != 2:
            dist.all_reduce(num_tokens)

    return step


def host_tensor_with_nccl(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step that sums a number of the host in a group whose only backend is NCCL."""
    model, x = _model(device)
    group = dist.new_group(list(range(world_size)), backend="nccl")

    def step() -> None:
        model(x).sum().backward()
        dist.all_reduce(torch.ones(1), group=group)

    return step


def builder_skipped(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step whose builder broadcasts the weights, but for the last rank, which believes that it has them."""
    model, x = _model(device)
    if rank != world_size - 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    return lambda: model(x).sum().backward()


def first_call_only(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in whose first call rank 0 reduces its input before the gradients are summed."""
    model, x = _model(device)
    num_calls = 0

    def step() -> None:
        nonlocal num_calls
        num_calls += 1
        model(x).sum().backward()
        if num_calls == 1 and rank == 0:
            dist.reduce(x, 0)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return step


def other_group(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which the last rank sums over all ranks and not over its pair."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        dist.all_reduce(model[0].weight.grad, group=None if rank == world_size - 1 else pairs[rank // 2])

    return step


def crossed_groups(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which rank 2 sums over two groups of the same ranks in the opposite order."""
    first, second = (dist.new_group(list(range(world_size))) for _ in range(2))
    model, x = _model(device)

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        sums = [(loss, first), (model[0].weight.grad, second)]
        for tensor, group in sums[:: -1 if rank == 2 else 1]:
            dist.all_reduce(tensor, group=group)

    return step


def two_groups(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step without a mistake: sums over two groups start in any order, and are waited for later."""
    first, second = (dist.new_group(list(range(world_size))) for _ in range(2))
    model, x = _model(device)

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        sums = [(loss, first), (model[0].weight.grad, second)]
        ordered = sums[:: -1 if rank == 2 else 1]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in ordered]
        for work in works:
            work.wait()

    return step


def members_only_group(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step that sums over the first two ranks, which make their group by themselves."""
    model, x = _model(device)
    if rank < 2:
        pair = dist.new_group([0, 1])

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        if rank < 2:
            dist.all_reduce(loss, group=pair)

    return step


def bad_sample(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step that fails on rank 2."""
    model, x = _model(device)

    def step() -> None:
        if rank == 2:
            raise ValueError("this sample has no tokens")
        model(x).sum().backward()

    return step


def never_waited(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step that uses gradients before they are summed: nothing waits for the sums."""
    model, x = _model(device)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

    return step


def unordered_streams(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step in which a second stream scales what the first one may still be computing."""
    model, x = _model(device)
    accelerator = torch.get_device_module(device)
    side = accelerator.Stream()

    def step() -> None:
        y = model(x)
        with accelerator.stream(side):
            scaled = y * 2
        accelerator.current_stream().wait_stream(side)
        scaled.sum().backward()

    return step


def _model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    with device:
        layers = (nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(*layers), torch.zeros(8, WIDTH)
