"""Every layout that trains gives what one process gives."""

from pathlib import Path
from typing import Any

import pytest

from training_runs import FinishedRun, tiny_job, train_on_ranks


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinishedRun]:
    folder = tmp_path_factory.mktemp("reference")
    return folder, train_on_ranks(tiny_job(folder), folder / "one", 1)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, {"dp_shard": 2}, marks=pytest.mark.long),
        pytest.param(4, {"dp_shard": 4, "reshard_after_forward": "never"}, marks=pytest.mark.long),
        pytest.param(2, {"dp_shard": 1, "dp_replicate": 2}, marks=pytest.mark.long),
        (4, {"dp_shard": 2, "dp_replicate": -1, "microbatch_size": 2}),
        (2, {"dp_shard": 2, "activation_checkpoint": "full", "microbatch_size": 4}),
        pytest.param(2, {"dp_shard": 2, "activation_checkpoint": "selective"}, marks=pytest.mark.long),
        pytest.param(2, {"dp_shard": 2, "activation_checkpoint_blocks": ["full", "selective"]}, marks=pytest.mark.long),
        (1, {"dp_shard": 1, "microbatch_size": 8}),
    ],
    ids=str,
)
def test_a_layout_changes_no_number(
    reference: tuple[Path, FinishedRun], tmp_path: Path, num_ranks: int, layout: dict[str, Any]
) -> None:
    folder, one = reference
    finished = train_on_ranks(tiny_job(folder, layout=layout), tmp_path / "run", num_ranks)
    assert finished.codes == [0] * num_ranks
    finished.require_close(one)


@pytest.mark.long
def test_the_same_run_twice_is_bit_equal(tmp_path: Path) -> None:
    first, second = (train_on_ranks(tiny_job(tmp_path), tmp_path / name, 2) for name in ("a", "b"))
    assert first.parameter_hash == second.parameter_hash
    assert first.losses == second.losses


def test_bfloat16_trains_close_to_float32(reference: tuple[Path, FinishedRun], tmp_path: Path) -> None:
    folder, one = reference
    finished = train_on_ranks(tiny_job(folder, precision={"compute": "bfloat16"}), tmp_path / "run", 2)
    assert finished.losses[6] == pytest.approx(one.losses[6], rel=5e-3)
    assert finished.losses[1] != one.losses[1]
