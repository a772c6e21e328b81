"""Float8 linear layers: every layout gives what one process gives with the same recipe and microbatches.

In float32 the sums of two layouts differ in the last bit, which moves a number or a scale of a whole tensor to the next
one of its format, from the first update on. Computed in float64 they round to the same float8 numbers and scales, so
that losses are compared exactly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.checkpoint.examine.contents import stored_tensors
from meshwright.spec.job.rules import float8_rules
from run_ranks import run_ranks
from training_runs import FinishedRun, tiny_job, train_all, train_all_on_ranks, train_on_this_rank

pytest.importorskip("torchao", reason="needs meshwright[torchao]")

MODEL: dict[str, Any] = {
    "source": "llama-1m",
    "options": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
}
Case = tuple[str, dict[str, Any]]
"""The recipe and the layout of a run."""


def _finished(folder: Path, num_ranks: int, cases: list[Case]) -> list[FinishedRun]:
    shared = {"model": MODEL, "train": {"steps": 3, "global_batch_size": 8}}
    sections = [
        {**shared, "layout": layout, "precision": {"float8": recipe, "compute": "float64"}} for recipe, layout in cases
    ]
    return train_all_on_ranks(folder, num_ranks, sections, _train_in_float64)


def _train_in_float64(jobs: list[dict[str, Any]], folders: list[str]) -> list[int]:
    """Train in a process whose emulated float8 matmuls sum in float64."""
    float8_ops = importlib.import_module("torchao.float8.float8_ops")
    float8_ops.FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = _product
    # Refused otherwise: no device multiplies float8 to float64.
    with mock.patch.object(float8_rules, "_precision_problems", return_value=()):
        return train_all(jobs, folders)


def _product(operator: Any, args: tuple[Any, Any], kwargs: Any = None) -> torch.Tensor:
    left, right = (one._data.double() / one._scale for one in args)
    return (left @ right).to(args[0]._orig_dtype)


COMPILED = {"compile": True, "compile_backend": "aot_eager"}
"""Around a ring, which stays eager, the compiler gets the rest of a block in parts, one of which begins with a linear
layer."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FinishedRun]:
    """Return for a recipe its run on one rank, each trained once."""
    return cache(lambda recipe: _finished(tmp_path_factory.mktemp("one"), 1, [(recipe, {})])[0])


@DYNAMO_WARNINGS
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (
            2,
            [
                ("tensorwise", {"dp_shard": 2}),
                ("rowwise", {"dp_shard": 1, "tp": 2}),
            ],
        ),
        pytest.param(
            2,
            [
                ("tensorwise", {"dp_shard": 1, "pp": 2, "schedule": "InterleavedZeroBubble"}),
                ("tensorwise", {"dp_shard": 1, "tp": 2}),
                ("rowwise_with_gw_hp", {"dp_shard": 1, "cp": 2}),
                ("rowwise", {"dp_shard": 1, "cp": 2, "cp_method": "ring", **COMPILED}),
                ("tensorwise", {"dp_shard": 1, "cp": 2, "activation_checkpoint": "selective"}),
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            [
                ("tensorwise", {"dp_shard": 2, "dp_replicate": 2, "activation_checkpoint": "full"}),
                ("tensorwise", {"dp_shard": 2, "tp": 2, "activation_checkpoint": "selective"}),
                ("tensorwise", {"dp_shard": 1, "tp": 4}),
                ("rowwise", {"dp_shard": 2, "cp": 2, "cp_method": "ring"}),
                ("rowwise_with_gw_hp", {"dp_shard": 1, "tp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_layout_changes_no_number(
    one_process: Callable[[str], FinishedRun], tmp_path: Path, num_ranks: int, cases: list[Case]
) -> None:
    for (recipe, layout), finished in zip(cases, _finished(tmp_path, num_ranks, cases), strict=True):
        # Ranks that share a key head round their parts of its gradient before they are summed.
        shares_heads = layout.get("tp", 1) > MODEL["options"]["num_kv_heads"]
        loss_bar, norm_bar = (2e-3, 1e-2) if shares_heads else (1e-9, 1e-9)
        for step, loss in one_process(recipe).losses.items():
            assert finished.losses[step] == pytest.approx(loss, rel=loss_bar), (recipe, layout)
            norm = one_process(recipe).grad_norms[step]
            assert finished.grad_norms[step] == pytest.approx(norm, rel=norm_bar), (recipe, layout)


def _train_parts(folder: str, parts: list[tuple[str, int | None, bool]]) -> list[int]:
    """Train a job of three steps, each time into a folder, up to a step, resumed or not."""
    codes = []
    for name, stop_after, resume in parts:
        job = tiny_job(
            Path(folder),
            model=MODEL,
            layout={"dp_shard": 2},
            precision={"float8": "tensorwise"},
            train={"steps": 3, "global_batch_size": 4, **({"stop_after": stop_after} if stop_after else {})},
        )
        codes.append(train_on_this_rank(job, f"{folder}/{name}", resume))
    return codes


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits_in_float32(tmp_path: Path) -> None:
    tiny_job(tmp_path)
    assert run_ranks(_train_parts, 2, str(tmp_path), [("whole", None, False), ("parts", 2, False)]) == [[0, 75]] * 2
    assert run_ranks(_train_parts, 2, str(tmp_path), [("parts", None, True)]) == [[0]] * 2
    whole, parts = (FinishedRun(tmp_path / name, [0]) for name in ("whole", "parts"))
    assert whole.parameter_hash == parts.parameter_hash
    assert whole.losses == parts.losses
    stored = stored_tensors(whole.run.checkpoint(3))
    assert {part.dtype for name, parts in stored.items() if name.startswith("model/") for part in parts} == {"float32"}
