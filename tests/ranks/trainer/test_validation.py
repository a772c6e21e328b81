"""Validation measures and leaves no trace: dropout is off, and router biases stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.checkpoint.checkpoint import read_metadata
from meshwright.checkpoint.examine.contents import stored_tensors
from training_runs import FinishedRun, tiny_job, train_on_ranks


class Dropping(nn.Module):
    """Drops so much that a loss measured with dropout is far from the one without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.head = nn.Linear(16, 257)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD).tanh()


ROUTED = {
    "source": "moe-4m",
    "options": {
        **{"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48},
        **{"expert_ffn_dim": 16, "num_experts": 4, "experts_per_token": 2, "router": {"bias_update_rate": 0.05}},
    },
}


def dropping(dropout: float) -> dict[str, Any]:
    return {"source": "test_validation:Dropping", "options": {"dropout": dropout}}


def stored_hashes(finished: FinishedRun) -> dict[str, Any]:
    """Return the hashes of the shards of everything in the last checkpoint, buffers included."""
    checkpoint = finished.run.checkpoint(finished.run.checkpoint_steps()[-1])
    stored = stored_tensors(checkpoint)
    return {name: [part.shard and part.shard.xxh3_128 for part in parts] for name, parts in stored.items()}


def test_dropout_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    losses = {}
    for dropout in (0.0, 0.9):
        # Without a learning rate both runs validate the same weights at every step.
        job = tiny_job(tmp_path, train={"validation_interval": 3}, optimizer={"learning_rate": 1e-30})
        finished = train_on_ranks({**job, "model": dropping(dropout)}, tmp_path / f"run-{dropout}", 2)
        losses[dropout] = finished.losses[1], [row["validation_loss"] for row in finished.validation]
    assert losses[0.0][1] == losses[0.9][1]
    assert losses[0.0][0] != losses[0.9][0]


@pytest.mark.long
@pytest.mark.parametrize("model", [ROUTED, dropping(0.5)], ids=["router bias", "dropout"])
def test_nothing_in_a_checkpoint_changes(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    plain = train_on_ranks({**tiny_job(tmp_path), "model": model}, tmp_path / "plain", 2)
    job = tiny_job(tmp_path, train={"validation_interval": 1})
    validated = train_on_ranks({**job, "model": model}, tmp_path / "validated", 2)
    assert len(validated.validation) == 6
    assert stored_hashes(validated) == stored_hashes(plain)


def test_checkpoints_of_the_lowest_validation_loss_are_kept(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path,
        train={"steps": 8, "validation_interval": 2},
        optimizer={"learning_rate": 0.5, "warmup_steps": 1},  # so high that the loss rises
        checkpoint={"interval": 2, "keep": 1, "keep_best": 2},
    )
    finished = train_on_ranks(job, tmp_path / "run", 2)
    losses = {row["step"]: row["validation_loss"] for row in finished.validation}
    assert set(losses) == {2, 4, 6, 8}
    assert set(finished.run.checkpoint_steps()) == {*sorted(losses, key=losses.__getitem__)[:2], 8}
    for step in finished.run.checkpoint_steps():
        assert read_metadata(finished.run.checkpoint(step))["validation_loss"] == losses[step]
