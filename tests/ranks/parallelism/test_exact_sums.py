"""train.exact_elastic: the same bits on any number of data-parallel ranks, also when it changes within a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.contract import next_token_loss
from meshwright.parallelism.exact_sums import norm_of
from run_ranks import run_ranks
from training_runs import TINY_MODEL, FinishedRun, tiny_job, train_all_on_ranks, train_on_ranks, train_on_this_rank

Sections = dict[str, dict[str, Any]]

# Shards of 36 and 44 rows on 3 and 5 ranks are uneven, and fill no vectors of a processor.
MODEL = {**TINY_MODEL["options"], "dim": 36, "ffn_dim": 44, "tie_embeddings": True}


def case(
    *, is_exact: bool = True, num_microbatches: int = 12, options: dict[str, Any] | None = None, **layout: Any
) -> Sections:
    """Return the sections of a job whose gradients are clipped, under a layout."""
    return {
        "model": {"source": "llama-1m", "options": {**MODEL, **(options or {})}},
        "train": {"steps": 3, "seq_len": 16, "global_batch_size": num_microbatches, "exact_elastic": is_exact},
        "optimizer": {"max_grad_norm": 0.5, "warmup_steps": 0},
        "layout": {"microbatch_size": 1, "dp_shard": 1, **layout},
        "checkpoint": {"interval": 0},
    }


def bits(run: FinishedRun) -> tuple[Any, ...]:
    """Return what must not depend on the number of ranks: parameters, losses and gradient norms."""
    assert min(run.grad_norms.values()) > 0.5
    return run.parameter_hash, run.losses, run.grad_norms


RunOfOne = Callable[[int], list[FinishedRun]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunOfOne:
    """Return for a number of microbatches the run of one rank, and the same without exact sums; each trained once."""

    @cache
    def trained(num_microbatches: int) -> list[FinishedRun]:
        cases = [case(is_exact=is_exact, num_microbatches=num_microbatches) for is_exact in (True, False)]
        return train_all_on_ranks(tmp_path_factory.mktemp("one"), 1, cases)

    return trained


@pytest.mark.parametrize(
    ("num_ranks", "layout", "num_microbatches"),
    [
        (2, {"dp_shard": 2}, 12),
        pytest.param(3, {"dp_replicate": 3}, 12, marks=pytest.mark.long),
        pytest.param(2, {"dp_shard": 2}, 60, marks=pytest.mark.long),
        pytest.param(3, {"dp_replicate": 3}, 60, marks=pytest.mark.long),
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, 60, marks=pytest.mark.long),
        pytest.param(5, {"dp_shard": 5}, 60, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_number_of_ranks_changes_no_bit(
    one: RunOfOne, tmp_path: Path, num_ranks: int, layout: dict[str, int], num_microbatches: int
) -> None:
    synced = "step" if "dp_replicate" not in layout else "microbatch"
    ways: list[dict[str, Any]] = [{}, {"gradient_sync": synced}, {"is_exact": False}]
    exact, otherwise, inexact = train_all_on_ranks(
        tmp_path, num_ranks, [case(num_microbatches=num_microbatches, **way, **layout) for way in ways]
    )
    alone, alone_inexact = one(num_microbatches)
    assert bits(exact) == bits(alone)
    assert bits(otherwise) == bits(alone)
    # So the comparison can fail, and the two modes are statistically the same: to rounding.
    assert inexact.parameter_hash not in (alone.parameter_hash, alone_inexact.parameter_hash)
    inexact.require_close(alone)


@pytest.mark.parametrize("num_microbatches", [12, pytest.param(60, marks=pytest.mark.long)])
def test_a_run_shrinks_and_grows_without_a_trace(tmp_path: Path, one: RunOfOne, num_microbatches: int) -> None:
    folder = tmp_path / "run"
    for stop_after, layout in ((1, {"dp_shard": 3}), (2, {"dp_shard": 2}), (3, {"dp_replicate": 2, "dp_shard": 2})):
        job = tiny_job(tmp_path, **case(num_microbatches=num_microbatches, **layout))
        job["train"]["stop_after"] = stop_after
        num_ranks = layout["dp_shard"] * layout.get("dp_replicate", 1)
        run = train_on_ranks(job, folder, num_ranks, resume=stop_after > 1)
    assert bits(run) == bits(one(num_microbatches)[0])


BESIDE = {
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "split backward": {"pp": 2, "schedule": "ZBVZeroBubble", "options": {"num_layers": 4}},
    "recomputation": {"tp": 2, "activation_checkpoint": "full", "cpu_offload": True},
}


@pytest.mark.long
def test_a_fixed_degree_beside_data_parallelism_changes_no_bit(tmp_path: Path) -> None:
    alone = train_all_on_ranks(tmp_path, 2, [case(**one) for one in BESIDE.values()])
    for num_ranks, layout in ((4, {"dp_shard": 2}), (4, {"dp_replicate": 2}), (6, {"dp_shard": 3})):
        folder = tmp_path / str(layout)
        folder.mkdir()
        runs = train_all_on_ranks(folder, num_ranks, [case(**layout, **one) for one in BESIDE.values()])
        assert {name: bits(run) for name, run in zip(BESIDE, runs, strict=True)} == {
            name: bits(run) for name, run in zip(BESIDE, alone, strict=True)
        }


@pytest.mark.long
def test_experts_and_bfloat16_change_no_bit(tmp_path: Path) -> None:
    def cases(**layout: int) -> list[Sections]:
        experts = case(**layout) | {"model": {"source": "moe-4m", "options": {"num_layers": 2}}}
        return [experts, case(**layout) | {"precision": {"compute": "bfloat16"}}]

    alone = [bits(run) for run in train_all_on_ranks(tmp_path, 1, cases())]
    for num_ranks, layout in ((2, {"dp_shard": 2}), (3, {"dp_replicate": 3})):
        assert [bits(run) for run in train_all_on_ranks(tmp_path, num_ranks, cases(**layout))] == alone


class Counting(nn.Module):
    """Has one weight for each token, and a buffer; its subclasses do what exact sums refuse."""

    factor, counts = 1.0, False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 257)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen += tokens_BS.float().mean()
        return self.embedding(tokens_BS)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.factor * next_token_loss(output, targets)


class Large(Counting):
    factor = 1e6


class Changing(Counting):
    counts = True


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Large", r"gradient norm = inf.*optimizer step was skipped.*a gradient of 8192 or more in one microbatch"),
        ("Changing", r"the forward of model.source = .* changes the buffer seen .* set train.exact_elastic to false"),
    ],
)
def test_what_cannot_be_summed_exactly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sections = case(dp_shard=2) | {"model": {"source": f"{Path(__file__).stem}:{model}", "options": {}}}
    with pytest.raises(AssertionError, match=said):
        run_ranks(train_on_this_rank, 2, tiny_job(tmp_path, **sections), str(tmp_path / "run"), False)


def norms(tensors: list[Tensor]) -> list[float]:
    """Return the norm of each of `tensors`, of which this rank has one part."""
    size, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    return [norm_of([(one.tensor_split(size)[rank], size)], size, device) for one in tensors]


def test_a_norm_does_not_depend_on_the_shards() -> None:
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    tensors = [drawn, torch.zeros(2), torch.tensor([3e38, 3e38]), torch.tensor([1e-42, 0.0])]
    tensors += [torch.tensor([1.0, math.nan]), torch.tensor([-math.inf, 1.0])]
    alone, shared = run_ranks(norms, 1, tensors)[0], run_ranks(norms, 3, tensors)
    assert shared == 3 * [alone]
    assert alone[:4] == pytest.approx([one.double().norm().item() for one in tensors[:4]], rel=1e-12)
    assert alone[4:] == [math.inf, math.inf]
