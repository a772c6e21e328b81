"""Steps that somebody else wrote with torch's own parallelism, for the tracer: (device, rank, world_size) -> step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BATCH, SEQ, DIM, VOCAB = 2, 16, 32, 48
Step = Callable[[], None]


class Layer(nn.Module):
    """A feed-forward layer with a norm and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = x_BSD + self.down(F.gelu(self.up(self.norm(x_BSD))))
        return out


class Model(nn.Module):
    """Two of them, between an embedding and a head; the second is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.layers[0](self.embedding(tokens_BS))
        logits: Tensor = self.head(checkpoint(self.layers[1], x_BSD, use_reentrant=False))
        return logits


def data_parallel(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under DistributedDataParallel."""
    with device:
        model = DistributedDataParallel(Model())
    return _step(model, device)


def fully_sharded(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under FSDP2."""
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    with device:
        model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, device)


def tensor_parallel(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under DTensor's tensor and sequence parallelism, whose collectives are waited for when used."""
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",))
    with device:
        model = Model()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    return _step(model, device)


def _step(model: nn.Module, device: torch.device) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens_BS = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)

    def step() -> None:
        logits_BSV = model(tokens_BS)
        F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
