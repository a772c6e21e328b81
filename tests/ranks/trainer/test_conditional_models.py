"""Models of which a sample uses a part: a rank may have no gradient for a parameter that others have one for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training_runs import tiny_job, train_on_ranks


class Either(nn.Module):
    """Two branches of one size, of which the parity of a sample's first token chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x_BSD: torch.Tensor, is_odd: bool) -> torch.Tensor:
        return x_BSD + torch.tanh((self.odd if is_odd else self.even)(x_BSD))


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.blocks = nn.ModuleList(Either() for _ in range(2))
        self.head = nn.Linear(8, 257)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, bool(tokens_BS[0, 0] % 2))
        # FSDP2 warns of views.
        return 1.0 * self.head(x_BSD)


class Wide(Conditional):
    """With branches too large to be copied with others before they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide_even, self.wide_odd = nn.Linear(8, 4096), nn.Linear(8, 4096)
        self.narrow = nn.Linear(4096, 8)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS)
        is_odd = bool(tokens_BS[0, 0] % 2)
        for block in self.blocks:
            x_BSD = block(x_BSD, is_odd)
        wide = self.wide_odd if is_odd else self.wide_even
        return 1.0 * self.head(x_BSD + self.narrow(torch.tanh(wide(x_BSD))))


def losses(folder: Path, num_ranks: int, source: str = "Conditional", **sections: Any) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; two samples a step, so that a rank of two has one."""
    folder.mkdir()
    train = {"steps": 12, "seq_len": 32, "global_batch_size": 2, "seed": 3, **sections.pop("train", {})}
    layout = {"microbatch_size": 1, **sections.pop("layout", {})}
    job = tiny_job(folder.parent, train=train, layout=layout, **sections)
    job["model"] = {"source": f"test_conditional_models:{source}"}
    finished = train_on_ranks(job, folder / "run", num_ranks)
    return [(row["loss"], row["grad_norm"]) for row in finished.rows]


@pytest.mark.parametrize(
    ("source", "sections"),
    [
        ("Conditional", {"layout": {"dp_shard": 2}}),
        ("Wide", {"layout": {"dp_replicate": 2, "dp_shard": 1}}),
        pytest.param("Conditional", {"layout": {"dp_replicate": 2, "dp_shard": 1}}, marks=pytest.mark.long),
        ("Conditional", {"layout": {"dp_shard": 2}, "train": {"exact_elastic": True, "global_batch_size": 4}}),
    ],
)
def test_what_a_rank_lacks_counts_as_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sections: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    alone = {name: dict(values) for name, values in sections.items()}
    alone["layout"] = {"dp_shard": 1}
    expected = losses(tmp_path / "alone", 1, source, **alone)
    found = losses(tmp_path / "shared", 2, source, **sections)
    assert len(found) == 12
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


class Samples:
    """Of which the second alone, in the first step, takes the odd branch."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(33) + 2 * index
        tokens[0] = int(index == 1)
        return tokens[:-1], tokens[1:]


def test_a_run_resumes_with_a_step_that_leaves_a_branch_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data = {"source": "test_conditional_models:Samples", "shuffle": False, "validation_fraction": 0.0}
    sections = {"data": data, "layout": {"microbatch_size": 1}, "checkpoint": {"interval": 1}}
    job = tiny_job(tmp_path, train={"steps": 4, "global_batch_size": 2, "validation_interval": 0}, **sections)
    job["model"] = {"source": "test_conditional_models:Conditional"}
    whole = train_on_ranks(job, tmp_path / "whole", 1)
    stopped = {**job, "train": {**job["train"], "stop_after": 1}}
    train_on_ranks(stopped, tmp_path / "stopped", 1)
    resumed = train_on_ranks(job, tmp_path / "stopped", 2, resume=True)
    resumed.require_close(whole)
