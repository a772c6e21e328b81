"""MXFP8 layers and float8 experts: every layout gives what one process gives with the same microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run_ranks import run_ranks
from training_runs import FinishedRun, tiny_job, train_on_this_rank

pytest.importorskip("torchao", reason="needs meshwright[torchao]")
pytestmark = pytest.mark.long

MODEL: dict[str, Any] = {
    "source": "moe-4m",
    "options": {
        "dim": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_dim": 128,
        "expert_ffn_dim": 64,
        "num_experts": 4,
        "experts_per_token": 2,
    },
}
Case = tuple[dict[str, Any], dict[str, Any]]
"""The precision and the layout of a run."""


def _train_all(cases: list[Case], names: list[str], folder: str) -> list[int]:
    """Train one job after another in one process group."""
    codes = []
    for (precision, layout), name in zip(cases, names, strict=True):
        job = tiny_job(
            Path(folder),
            model=MODEL,
            layout=layout,
            precision=precision,
            train={"steps": 3, "global_batch_size": 4},
            checkpoint={"interval": 0},
        )
        codes.append(train_on_this_rank(job, f"{folder}/{name}", False))
    return codes


def _finished(folder: Path, num_ranks: int, cases: list[Case]) -> list[FinishedRun]:
    names = [f"{num_ranks}-{index}" for index in range(len(cases))]
    tiny_job(folder)  # writes the text that all ranks read
    for codes in run_ranks(_train_all, num_ranks, cases, names, str(folder)):
        assert codes == [0] * len(cases)
    return [FinishedRun(folder / name, [0]) for name in names]


MXFP8 = {"float8": "mxfp8"}
EXPERTS = {"float8": "rowwise", "float8_experts": True}


def test_a_layout_changes_no_number(tmp_path: Path) -> None:
    plain, mxfp8, linear, experts = _finished(
        tmp_path, 1, [({}, {}), (MXFP8, {}), ({"float8": "rowwise"}, {}), (EXPERTS, {})]
    )
    assert len({run.losses[1] for run in (plain, mxfp8, linear, experts)}) == 4
    cases: list[Case] = [
        (MXFP8, {"dp_shard": 2}),
        (MXFP8, {"dp_shard": 1, "tp": 2}),
        (MXFP8, {"dp_shard": 1, "cp": 2}),
        (MXFP8, {"dp_shard": 1, "pp": 2, "schedule": "ZBVZeroBubble"}),
        (EXPERTS, {"dp_shard": 2}),
        (EXPERTS, {"dp_shard": 2, "ep": 2}),
        (EXPERTS, {"dp_shard": 1, "tp": 2, "etp": 2}),
        (EXPERTS, {"dp_shard": 2, "ep": 2, "activation_checkpoint": "full"}),
    ]
    for (precision, layout), found in zip(cases, _finished(tmp_path, 2, cases), strict=True):
        expected = mxfp8 if precision is MXFP8 else experts
        for step, loss in expected.losses.items():
            assert found.losses[step] == pytest.approx(loss, rel=1e-5 if step == 1 else 5e-4), (precision, layout)
            norm = expected.grad_norms[step]
            assert found.grad_norms[step] == pytest.approx(norm, rel=1e-3 if step == 1 else 1e-2), (precision, layout)
