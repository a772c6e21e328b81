"""Float8 linear layers: every layout gives what one process gives with the same recipe and microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run_ranks import run_ranks
from training_runs import FinishedRun, tiny_job, train_on_this_rank

pytest.importorskip("torchao", reason="needs meshwright[torchao]")

MODEL: dict[str, Any] = {
    "source": "llama-1m",
    "options": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
}
Case = tuple[str, dict[str, Any]]
"""The recipe and the layout of a run."""


def _train_all(cases: list[Case], names: list[str], folder: str, precision: dict[str, Any]) -> list[int]:
    """Train one job after another in one process group."""
    codes = []
    for (recipe, layout), name in zip(cases, names, strict=True):
        job = tiny_job(
            Path(folder),
            model=MODEL,
            layout=layout,
            precision={"float8": recipe, **precision},
            train={"steps": 3, "global_batch_size": 4},
            checkpoint={"interval": 0},
        )
        codes.append(train_on_this_rank(job, f"{folder}/{name}", False))
    return codes


def _finished(folder: Path, num_ranks: int, cases: list[Case], **precision: Any) -> list[FinishedRun]:
    names = [f"{num_ranks}-{index}" for index in range(len(cases))]
    tiny_job(folder)  # writes the text that all ranks read
    for codes in run_ranks(_train_all, num_ranks, cases, names, str(folder), precision):
        assert codes == [0] * len(cases)
    return [FinishedRun(folder / name, [0]) for name in names]


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    folder = tmp_path_factory.mktemp("one")
    return dict(zip(RECIPES, _finished(folder, 1, [(recipe, {}) for recipe in RECIPES]), strict=True))


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (
            2,
            [
                ("tensorwise", {"dp_shard": 2}),
                ("tensorwise", {"dp_shard": 1, "tp": 2}),
                ("rowwise", {"dp_shard": 1, "tp": 2}),
                ("rowwise_with_gw_hp", {"dp_shard": 1, "cp": 2}),
                ("tensorwise", {"dp_shard": 1, "cp": 2, "activation_checkpoint": "selective"}),
                ("tensorwise", {"dp_shard": 1, "pp": 2, "schedule": "InterleavedZeroBubble"}),
            ],
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
    one_process: dict[str, FinishedRun], tmp_path: Path, num_ranks: int, cases: list[Case]
) -> None:
    for (recipe, layout), finished in zip(cases, _finished(tmp_path, num_ranks, cases), strict=True):
        for step, loss in one_process[recipe].losses.items():
            # Rounding of sums makes some numbers round to another number in float8, from the first update on.
            loss_bar, norm_bar = (2e-6, 1e-4) if step == 1 else (1e-4, 2e-3)
            assert finished.losses[step] == pytest.approx(loss, rel=loss_bar), (recipe, layout)
            # Ranks that share a key head round their parts of its gradient before they are summed.
            norm_bar = 5e-3 if layout.get("tp", 1) > MODEL["options"]["num_kv_heads"] else norm_bar
            norm = one_process[recipe].grad_norms[step]
            assert finished.grad_norms[step] == pytest.approx(norm, rel=norm_bar), (recipe, layout)
