"""Models of the user's own, with what Llama does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compiler_warnings import COMPILER_WARNINGS
from training_runs import tiny_job, train_on_ranks


class Block(nn.Module):
    """Keeps running statistics, and an odd byte before other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("none", torch.zeros(0))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x_BSD).transpose(1, 2)).transpose(1, 2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


class Headed(Normed):
    """Names its head, with a bias, for a loss in chunks; without statistics, which amplify rounding in validation."""

    tensor_parallel = {"head": "head"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))


class Positioned(nn.Module):
    """Adds a float32 table to activations, so that its blocks get float32 whatever is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.register_buffer("table", torch.randn(32, 8), persistent=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS) + self.table
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD).tanh()


def test_blocks_take_float32_inputs_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = tiny_job(tmp_path, precision={"compute": "bfloat16"}, train={"validation_interval": 6})
    job["model"] = {"source": "test_own_models:Positioned"}
    finished = train_on_ranks(job, tmp_path / "run", 2)
    assert finished.losses[6] < finished.losses[1]


@pytest.mark.long
def test_running_statistics_resume_exactly_under_any_recompute_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = tiny_job(tmp_path, train={"validation_interval": 2})
    job["model"] = {"source": "test_own_models:Normed"}
    straight = train_on_ranks(job, tmp_path / "straight", 2)
    stopped = {**job, "train": {**job["train"], "stop_after": 3}}
    train_on_ranks(stopped, tmp_path / "stopped", 2)
    resumed = train_on_ranks(job, tmp_path / "stopped", 2, resume=True)
    assert resumed.parameter_hash == straight.parameter_hash
    assert [row["validation_loss"] for row in resumed.validation] == [
        row["validation_loss"] for row in straight.validation
    ]

    train_on_ranks(stopped, tmp_path / "changed", 2)
    recomputed = {**job, "layout": {**job["layout"], "activation_checkpoint": "full"}}
    changed = train_on_ranks(recomputed, tmp_path / "changed", 2, resume=True)
    assert changed.losses[6] == pytest.approx(straight.losses[6], rel=1e-6)


# As `meshwright train` does: torch 2.13 warns of the view that a last linear layer returns.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_loss_in_chunks_computes_the_head_that_the_model_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = tiny_job(tmp_path, train={"validation_interval": 6})
    job["model"] = {"source": "test_own_models:Headed"}
    at_once = train_on_ranks(job, tmp_path / "at_once", 2)
    job["layout"] = {"dp_shard": 2, "loss_chunks": 5}
    chunked = train_on_ranks(job, tmp_path / "chunked", 2)
    assert chunked.losses == pytest.approx(at_once.losses, rel=2e-6)
    assert chunked.grad_norms == pytest.approx(at_once.grad_norms, rel=1e-5)
    assert chunked.validation[0]["validation_loss"] == pytest.approx(at_once.validation[0]["validation_loss"], rel=2e-6)


@pytest.mark.long
@COMPILER_WARNINGS
def test_blocks_of_torchs_own_classes_are_compiled_under_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found = {}
    for compiles in (False, True):
        layout = {"dp_shard": 2, "compile": compiles, "compile_backend": "aot_eager"}
        job = tiny_job(tmp_path, layout=layout)
        job["model"] = {"source": "test_own_models:Positioned"}
        found[compiles] = train_on_ranks(job, tmp_path / f"compiled-{compiles}", 2)
    found[True].require_close(found[False])
