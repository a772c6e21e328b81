"""Ranks that share each layer give the loss and every gradient that one process gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from meshwright.models.contract import blocks_of, next_token_loss
from meshwright.models.llama import Llama
from meshwright.parallelism.loss import make_loss
from meshwright.parallelism.materialize import materialize
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.tensor import apply_tensor_parallel
from meshwright.spec.architecture import LlamaArchitecture
from meshwright.spec.layout import Layout
from run_ranks import run_ranks

_SIZES = {
    "vocab_size": 32,
    "dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_dim": 24,
}


def _batch() -> tuple[Tensor, Tensor]:
    tokens_BS = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[0, 3:9] = -100
    return tokens_BS[:, :-1], targets_BS


def _meta_model(changes: dict[str, Any], dtype: torch.dtype) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaArchitecture(**{**_SIZES, **changes})).to(dtype)


def _one_process(changes: dict[str, Any], dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    model = _meta_model(changes, dtype)
    materialize(model, "cpu", seed=1)
    inputs, targets = _batch()
    loss = next_token_loss(model(inputs), targets)
    loss.backward()
    return loss.item(), {name: _gradient(parameter) for name, parameter in model.named_parameters()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _on_a_rank(
    layout: Layout, changes: dict[str, Any], dtype: torch.dtype, sums_replicated: bool
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the whole gradients, by name."""
    meshes = build_meshes(layout, "cpu")
    model = _meta_model(changes, dtype)
    loss_fn = make_loss(model, meshes)
    apply_tensor_parallel(model, meshes)
    if layout.compile:
        for block in blocks_of(model):
            block.compile(backend=layout.compile_backend, fullgraph=True)
    if layout.fsdp > 1:
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=meshes.sharding("fsdp"))
    materialize(model, "cpu", seed=1)
    inputs, targets = _batch()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = _gradient(parameter)
        assert isinstance(gradient, DTensor)
        if sums_replicated and gradient.placements[-1] == Replicate():
            dist.all_reduce(gradient.to_local(), group=meshes.group("tp"))
        whole[name] = gradient.full_tensor()
    return loss.item(), whole


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of any gradient over its norm, and its name.

    A gradient of nearly nothing is held against a thousandth of the norm that each would have if all were alike.
    """
    floor = 1e-3 * math.sqrt(sum(float(g.norm()) ** 2 for g in expected.values()) / len(expected))
    assert found.keys() == expected.keys()
    return max((float((found[n] - g).norm()) / max(float(g.norm()), floor), n) for n, g in expected.items())


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {"qk_norm": True}),
        ({"tp": 4}, {"num_kv_heads": 2, "qk_norm": True}),
        ({"tp": 4}, {"num_kv_heads": 1}),
        ({"tp": 2}, {"tie_embeddings": True}),
        ({"tp": 2, "dp_shard": 2}, {"num_kv_heads": 1, "tie_embeddings": True}),
        ({"tp": 2, "compile": True, "compile_backend": "aot_eager"}, {"num_kv_heads": 1, "qk_norm": True}),
        ({"tp": 2, "dp_shard": 2, "compile": True, "compile_backend": "aot_eager"}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "loss_bar", "bar"), [(torch.float32, 2e-6, 1e-5), (torch.float64, 1e-13, 1e-11)])
def test_ranks_give_what_one_process_gives(
    layout: dict[str, Any], changes: dict[str, Any], dtype: torch.dtype, loss_bar: float, bar: float
) -> None:
    expected_loss, expected = _one_process(changes, dtype)
    layout_ = Layout(**layout)
    for loss, gradients in run_ranks(_on_a_rank, layout_.num_ranks, layout_, changes, dtype, True):
        assert loss == pytest.approx(expected_loss, rel=loss_bar)
        worst, name = _worst(gradients, expected)
        assert worst <= bar, name
