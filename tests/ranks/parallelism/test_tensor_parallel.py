"""Ranks that share each layer give the loss and every gradient that one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.models.contract import next_token_loss
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from run_ranks import run_ranks
from tensor_parity import TINY, Found, meta_model, of_one_process, of_this_rank, worst

pytestmark = DYNAMO_WARNINGS

_COMPILED = {"compile": True, "compile_backend": "aot_eager"}


def _on_a_rank(architecture: LlamaArchitecture, dtype: torch.dtype, layout: Layout, sums_replicated: bool) -> Found:
    return of_this_rank(meta_model(architecture, dtype), layout, sums_replicated=sums_replicated)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {"qk_norm": True}),
        ({"tp": 4}, {"num_kv_heads": 2, "qk_norm": True}),
        ({"tp": 4}, {"num_kv_heads": 1}),
        ({"tp": 2}, {"tie_embeddings": True}),
        ({"tp": 2, "dp_shard": 2}, {"num_kv_heads": 1, "tie_embeddings": True}),
        pytest.param({"tp": 2, **_COMPILED}, {"num_kv_heads": 1, "qk_norm": True}, marks=pytest.mark.long),
        pytest.param({"tp": 2, "dp_shard": 2, **_COMPILED}, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "loss_bar", "gradient_bar"),
    [pytest.param(torch.float32, 2e-6, 1e-5, marks=pytest.mark.long), (torch.float64, 1e-13, 1e-11)],
    ids=str,
)
def test_ranks_find_what_one_process_finds(
    layout: dict[str, Any], changes: dict[str, Any], dtype: torch.dtype, loss_bar: float, gradient_bar: float
) -> None:
    _assert_as_one_process(layout, changes, dtype, loss_bar, gradient_bar)


@pytest.mark.long
def test_compiled_ranks_find_in_float64_what_one_process_finds() -> None:
    _assert_as_one_process({"tp": 2, "dp_shard": 2, **_COMPILED}, {}, torch.float64, 1e-13, 1e-11)


def _assert_as_one_process(
    layout: dict[str, Any], changes: dict[str, Any], dtype: torch.dtype, loss_bar: float, gradient_bar: float
) -> None:
    architecture = LlamaArchitecture(**{**TINY, **changes})
    expected_loss, expected = of_one_process(meta_model(architecture, dtype))
    wanted = Layout(**layout)
    for loss, gradients in run_ranks(_on_a_rank, wanted.num_ranks, architecture, dtype, wanted, True):
        assert loss == pytest.approx(expected_loss, rel=loss_bar)
        difference, name = worst(gradients, expected)
        assert difference <= gradient_bar, name


class OwnModel(nn.Module):
    """A user's model: built on the CPU, with biases, and with a loss of its own."""

    tensor_parallel = {
        "embedding": "vocabulary",
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.0": "column",
        "blocks.*.ffn.2": "row",
        "head": "head",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(8), "ffn": nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 32)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = x_BSD + block["ffn"](block["norm"](x_BSD))
        return self.head(x_BSD)

    def loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return next_token_loss(logits_BSV, targets_BS) + 0.1 * logits_BSV.logsumexp(-1).square().mean()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}], ids=str)
def test_a_users_model_says_itself_how_it_is_shared(layout: dict[str, Any]) -> None:
    expected_loss, expected = of_one_process(OwnModel().double())
    wanted = Layout(**layout)
    for loss, gradients in run_ranks(_own_on_a_rank, wanted.num_ranks, wanted):
        assert loss == pytest.approx(expected_loss, rel=1e-13)
        difference, name = worst(gradients, expected)
        assert difference <= 1e-11, name


def _own_on_a_rank(layout: Layout) -> Found:
    return of_this_rank(OwnModel().double(), layout)


def test_what_is_whole_on_each_rank_gets_a_part_of_its_gradient_there() -> None:
    architecture = LlamaArchitecture(**{**TINY, "qk_norm": True})
    _, expected = of_one_process(meta_model(architecture, torch.float32))
    for _, gradients in run_ranks(_on_a_rank, 2, architecture, torch.float32, Layout(tp=2), False):
        wrong = {
            name for name, gradient in gradients.items() if worst({name: gradient}, {name: expected[name]})[0] > 0.1
        }
        assert wrong == {name for name in expected if name.endswith("norm.weight")}
