"""One process's loss and gradients of a tiny model, and those of ranks that share each layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from meshwright.models.build import build_architecture
from meshwright.models.contract import blocks_of, loss_of
from meshwright.parallelism.data.materialize import materialize
from meshwright.parallelism.losses.loss import NextTokenLoss, counted_share, make_loss
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.tensor.tensor_parallel import apply_async_tensor_parallel, apply_tensor_parallel
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture

TINY = {
    "vocab_size": 32,
    "dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_dim": 24,
}

Found = tuple[float, dict[str, Tensor]]
"""The loss, and the whole gradient of each parameter."""


def batch() -> tuple[Tensor, Tensor]:
    """Return (inputs_BS, targets_BS), some of which do not count."""
    tokens_BS = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[0, 3:9] = -100
    return tokens_BS[:, :-1], targets_BS


def meta_model(architecture: LlamaArchitecture, dtype: torch.dtype) -> nn.Module:
    """Return the model without memory."""
    with torch.device("meta"):
        return build_architecture(architecture).to(dtype)


def of_one_process(model: nn.Module) -> Found:
    """Return what one process finds."""
    materialize(model, "cpu", seed=1)
    inputs, targets = batch()
    loss = loss_of(model)(model(inputs), targets)
    loss.backward()
    return loss.item(), {name: _gradient(parameter) for name, parameter in model.named_parameters()}


def of_this_rank(
    model: nn.Module, layout: Layout, *, sums_replicated: bool = True, backend: Callable[..., Any] | None = None
) -> Found:
    """Return what this rank finds, with gradients of what is whole on each rank summed over tp, or not.

    `backend` takes the place of layout.compile_backend.
    """
    meshes = build_meshes(layout, "cpu")
    loss_fn = make_loss(model, meshes)
    apply_tensor_parallel(model, meshes)
    apply_async_tensor_parallel(meshes)
    if layout.compile:
        for block in blocks_of(model):
            block.compile(backend=backend or layout.compile_backend, fullgraph=True)
    if layout.fsdp > 1:
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=meshes.sharding("fsdp"))
    materialize(model, "cpu", seed=1)
    inputs, targets = batch()
    # One graph serves all blocks.
    with torch._dynamo.config.patch(error_on_recompile=True):
        loss = loss_fn(model(inputs), targets)
        if isinstance(loss_fn, NextTokenLoss):
            loss = loss / counted_share([targets], torch.device("cpu")).to(loss.dtype)
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = _gradient(parameter)
        assert isinstance(gradient, DTensor)
        if sums_replicated and gradient.placements[-1] == Replicate():
            dist.all_reduce(gradient.to_local(), group=meshes.group("tp"))
        gradients[name] = gradient.full_tensor()
    return loss.item(), gradients


def worst(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of any gradient over its norm, and its name.

    A gradient of nearly nothing is held against a thousandth of the norm that each would have if all were alike.
    """
    assert gradients.keys() == expected.keys()
    least = 1e-3 * math.sqrt(sum(float(one.norm()) ** 2 for one in expected.values()) / len(expected))
    return max((float((gradients[n] - one).norm()) / max(float(one.norm()), least), n) for n, one in expected.items())


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
