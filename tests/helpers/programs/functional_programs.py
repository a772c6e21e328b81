"""Programs whose collectives are functional: in eager code, and in what torch.compile makes kernels of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Step = Callable[[], object]
WIDTH = 64


def communicated(x: Tensor) -> Tensor:
    """Return a number that every functional collective has a part in, and some that torch.compile makes such of."""
    group = dist.group.WORLD
    product, shifted = x @ x, x + 9
    dist.all_reduce(shifted)
    gathered = x.new_empty(group.size() * WIDTH, WIDTH)
    dist.all_gather_into_tensor(gathered, x * 9)
    found = [
        shifted,
        gathered,
        # In memory of its own, of another operation's that nobody reads again, and of one that is read again.
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x @ x, "max", group),
        funcol.all_reduce(product, "sum", group) + product,
        funcol.all_reduce((x + 1).view(-1), "sum", group),
        funcol.broadcast(x * 2, 1, group),
        funcol.all_gather_tensor(x * 3, 0, group),
        funcol.reduce_scatter_tensor(x * 4, "sum", 0, group),
        funcol.all_to_all_single(x * 5, None, None, group),
        *funcol.all_reduce_coalesced([x * 6, x @ x], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x * 7, x + 7], group),
        *funcol.reduce_scatter_tensor_coalesced([x * 8, x + 8], "sum", [0, 0], group),
    ]
    return torch.stack([one.mul(2).sum() for one in found]).sum()


def functional(device: torch.device, rank: int, world_size: int, how: str) -> Step:
    """Return a step of them, compiled or not."""
    run = torch.compile(communicated) if how == "compiled" else communicated
    x = torch.ones(WIDTH, WIDTH, device=device)
    return lambda: run(x)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def tensor_parallel(device: torch.device, rank: int, world_size: int, how: str) -> Step:
    """Return a step of two blocks with DTensor's tensor parallelism, of which rank 1 may skip one."""
    mesh = init_device_mesh(device.type, (world_size,))
    blocks = nn.ModuleList([_Layers().to(device) for _ in range(2)])
    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how != "eager":
            block.compile()
    x = torch.ones(WIDTH, WIDTH, device=device)

    def step() -> None:
        y = x
        for number, block in enumerate(blocks):
            if how != "skipped" or rank != 1 or number != 1:
                y = block(y)
        y.sum().backward()

    return step


def skipped(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step in which rank 1 skips a compiled block."""
    return tensor_parallel(device, rank, world_size, "skipped")


def resharded(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step that shards a tensor along another dimension, and its gradient back."""
    mesh = init_device_mesh(device.type, (world_size,))
    x = torch.ones(8, WIDTH, WIDTH, device=device, requires_grad=True)

    def step() -> None:
        found = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Shard(2)])
        found.to_local().pow(2).sum().backward()

    return step


def not_resharded(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step in which rank 2 takes its tensor as sharded as it shall be."""
    mesh = init_device_mesh(device.type, (world_size,))
    x = torch.ones(WIDTH, WIDTH, device=device)

    def step() -> None:
        found = DTensor.from_local(x, mesh, [Shard(1 if rank == 2 else 0)]).redistribute(placements=[Shard(1)])
        found.to_local().sum()

    return step
