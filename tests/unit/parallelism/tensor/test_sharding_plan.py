"""Errors of a sharding plan, and where each parameter is sharded. One process simulates the second rank of four."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.errors import ConfigError, InfeasibleLayout, MeshwrightError, UnsupportedError
from meshwright.models.adapted_linear import add_adapter
from meshwright.models.build import build_architecture
from meshwright.parallelism.losses.loss import vocab_parallel_losses
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.tensor.tensor_parallel import apply_tensor_parallel
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.step.adapter import Adapter

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "dim": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_dim": 24,
}


@pytest.fixture(autouse=True)
def second_of_four() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _sharded(model: nn.Module, **layout: int) -> nn.Module:
    apply_tensor_parallel(model, build_meshes(Layout(**{"tp": 4} | layout), "cpu"))
    return model


def _placements(model: nn.Module) -> dict[str, Placement]:
    placements = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        (placements[name],) = parameter.placements
    return placements


def _llama(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return build_architecture(LlamaArchitecture(**{**_SIZES, **changes}))


def test_placements_of_a_llama() -> None:
    assert _placements(_sharded(_llama(qk_norm=True))) == {
        "embedding.weight": Shard(0),
        "blocks.0.attention_norm.weight": Replicate(),
        "blocks.0.attention.query.weight": Shard(0),
        "blocks.0.attention.key.weight": Shard(0),
        "blocks.0.attention.value.weight": Shard(0),
        "blocks.0.attention.output.weight": Shard(1),
        "blocks.0.attention.query_norm.weight": Replicate(),
        "blocks.0.attention.key_norm.weight": Replicate(),
        "blocks.0.ffn_norm.weight": Replicate(),
        "blocks.0.ffn.gate.weight": Shard(0),
        "blocks.0.ffn.up.weight": Shard(0),
        "blocks.0.ffn.down.weight": Shard(1),
        "norm.weight": Replicate(),
        "head.weight": Shard(0),
    }


@pytest.mark.parametrize("etp", [1, 4])
def test_placements_of_a_mixture_with_latent_attention(etp: int) -> None:
    latent = {"query_rank": 8, "kv_rank": 8, "plain_head_dim": 6, "rope_head_dim": 2, "value_head_dim": 4}
    sizes = {**_SIZES, "num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 8, "num_shared_experts": 1}
    with torch.device("meta"):
        model = build_architecture(MoEArchitecture(**sizes, latent=latent))
    _sharded(model, etp=etp)
    parameters = dict(model.named_parameters())
    experts = {name for name in parameters if ".experts." in name}
    # They are sharded later, over other ranks.
    assert not any(isinstance(parameters[name], DTensor) for name in experts)
    for name in experts:
        parameters.pop(name)
    cut = {name for name, parameter in parameters.items() if parameter.placements != (Replicate(),)}  # type: ignore[attr-defined]
    assert cut == {
        "embedding.weight",
        "blocks.0.attention.query_up.weight",
        "blocks.0.attention.kv_up.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.ffn.shared.gate.weight",
        "blocks.0.ffn.shared.up.weight",
        "blocks.0.ffn.shared.down.weight",
        "head.weight",
    }


def test_meta_parameters_stay_meta() -> None:
    model = _sharded(_llama())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_built_model_is_sliced() -> None:
    model = Own()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _sharded(model)
    # A user may freeze a parameter.
    assert not dict(model.named_parameters())["up.bias"].requires_grad
    assert torch.equal(model.up.weight, whole["up.weight"][2:4])
    assert torch.equal(model.down.weight, whole["down.weight"][:, 2:4])
    assert torch.equal(model.norm.weight, whole["norm.weight"])


def test_tp_1_changes_nothing() -> None:
    model = _sharded(_llama(), tp=1, dp_shard=4)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


class Own(nn.Module):
    tensor_parallel: Any = {"up": "column", "down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.up.bias.requires_grad_(False)
        self.down = nn.Linear(8, 6)
        self.words = nn.Embedding(8, 6, padding_idx=0)


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (None, UnsupportedError, "Own has no attribute tensor_parallel"),
        (["up"], ConfigError, "Own.tensor_parallel holds ['up']"),
        ({"up": "columns"}, ConfigError, "Own.tensor_parallel holds 'columns'"),
        ({"upp": "column"}, ConfigError, "names 'upp', which matches no module of the model (norm, up, down"),
        ({"norm": "row"}, UnsupportedError, "norm is a LayerNorm: the role row needs an nn.Linear"),
        ({"words": "vocabulary"}, UnsupportedError, "words has padding_idx or max_norm"),
        ({"down": "column"}, InfeasibleLayout, "layout.tp = 4: must divide dim 0 of down.weight, which is 6; "),
        ({"up": "kv"}, UnsupportedError, "up has the role kv: its parent module must have the attribute head_dim"),
    ],
    ids=str,
)
def test_an_invalid_plan_is_an_error(plan: Any, kind: type[MeshwrightError], message: str) -> None:
    model = Own()
    model.tensor_parallel = plan
    with pytest.raises(kind, match=r".*") as error:
        _sharded(model)
    assert message in str(error.value)


def test_the_nearest_degrees_are_named() -> None:
    with pytest.raises(InfeasibleLayout, match=r"which is 6; set layout.tp to 2 or 3, or change"):
        _sharded(_llama(vocab_size=6))
    with pytest.raises(InfeasibleLayout, match=r"the 6 key/value heads of .*; set layout.tp to 2 or 3$"):
        _sharded(_llama(num_heads=12, num_kv_heads=6))


def test_the_blocks_of_a_base_in_few_bits_are_named_as_such() -> None:
    model = _llama(head_dim=32)
    add_adapter(model, Adapter(kind="lora", base_dtype="nf4", targets=("blocks.*.attention.output",)), seed=0)
    problem = r"must divide the 2 blocks of 64 inputs in which adapter.base_dtype keeps blocks.0.attention.output; set "
    with pytest.raises(InfeasibleLayout, match=problem + 'layout.tp to 1 or 2, or adapter.base_dtype to "bfloat16"'):
        _sharded(model)


class Ended(nn.Module):
    """Ends with a norm and a head, which both can gather the sequence."""

    def __init__(self, **roles: str) -> None:
        super().__init__()
        self.tensor_parallel = roles
        # A stage of a pipeline has None for what others have.
        self.blocks = nn.ModuleList([None])  # type: ignore[list-item]
        self.words = nn.Embedding(8, 8)
        self.norm, self.dropout, self.head = nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 8)


def test_a_norm_that_gathers_before_a_head_is_named() -> None:
    with pytest.raises(ConfigError, match="norm has the role gather_output and head after it the role head, which"):
        _sharded(Ended(words="vocabulary", norm="gather_output", head="head"))
    _sharded(Ended(words="vocabulary", norm="gather_output", head="column"))
    _sharded(Ended(words="vocabulary", head="head"))


@pytest.mark.parametrize(
    ("tokens", "advice"), [(16, "gathers the sequence, and so does the role head"), (2, "give the last layer the role")]
)
def test_logits_of_another_number_of_tokens_are_explained(tokens: int, advice: str) -> None:
    group = build_meshes(Layout(tp=4), "cpu").group("tp")
    with pytest.raises(ConfigError, match=advice):
        vocab_parallel_losses(torch.zeros(1, tokens, 3), torch.zeros(1, 4, dtype=torch.int64), group)
