"""AdamW of the trainer: which parameters decay, and 30 steps of it against torch's own loop."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.build import build_architecture
from meshwright.spec.job.sections import OptimizerSection
from meshwright.spec.model.presets import PRESETS
from meshwright.trainer.optimizer.optimizer import build_optimizer

SECTION = OptimizerSection(learning_rate=1e-2, weight_decay=0.5, betas=(0.9, 0.95), eps=1e-8)


class WithNorms(nn.Module):
    """A matrix, a bias, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 7)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.embedding(tokens_T)))


def test_only_matrices_decay() -> None:
    model = WithNorms()
    optimizer = build_optimizer(model, SECTION)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    decay = {name_of[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {
        "embedding.weight": 0.5,
        "linear.weight": 0.5,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "linear.bias": 0.0,
    }


def test_biases_of_experts_do_not_decay() -> None:
    model = build_architecture(PRESETS["gpt-oss-4m"])
    decaying = [group for group in build_optimizer(model, SECTION).param_groups if group["weight_decay"]]
    decayed = {id(parameter) for group in decaying for parameter in group["params"]}
    names = {name for name, parameter in model.blocks[0].named_parameters() if id(parameter) in decayed}
    assert names == {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *("ffn.router.weight", "ffn.experts.gate", "ffn.experts.up", "ffn.experts.down"),
    }


def test_thirty_steps_are_those_of_a_plain_loop() -> None:
    ours, plain = WithNorms(), WithNorms()
    matrices = [plain.embedding.weight, plain.linear.weight]
    vectors = [plain.norm.weight, plain.norm.bias, plain.linear.bias]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    tokens_T = torch.arange(7)
    for model, optimizer in ((ours, build_optimizer(ours, SECTION)), (plain, reference)):
        for _ in range(30):
            nn.functional.cross_entropy(model(tokens_T), tokens_T.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
