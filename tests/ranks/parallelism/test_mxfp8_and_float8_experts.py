"""MXFP8 layers and float8 experts: every layout gives what one process gives with the same microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training_runs import FinishedRun, train_all_on_ranks

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


def _finished(folder: Path, num_ranks: int, cases: list[Case]) -> list[FinishedRun]:
    sections = [{"model": MODEL, "layout": layout, "precision": precision} for precision, layout in cases]
    return train_all_on_ranks(folder, num_ranks, sections)


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
