"""reshard: bit-equal for any shapes and any number of ranks, and nothing left of one that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.checkpoint import reshard as resharding
from meshwright.checkpoint import saving
from meshwright.checkpoint.checkpoint import load, save
from meshwright.checkpoint.examine.difference import difference
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.manifest import read_index, read_manifest
from meshwright.checkpoint.reshard import reshard
from meshwright.errors import ConfigError, DamagedCheckpoint
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import hold

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


def state(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    return {
        "model": {f"t{n}": (torch.rand(shape) * 50).to(dtypes[n % len(dtypes)]) for n, shape in enumerate(shapes)},
        "optimizer": {"t0": {"step": torch.tensor(3.0)}},
    }


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES, st.integers(1, 7), st.integers(1, 7), st.integers(1, 100), st.integers(1, 100))
def test_the_copy_is_bitwise_equal(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    first: int,
    second: int,
    stored_bytes: int,
    written_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("reshard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "MAX_SHARD_BYTES", stored_bytes)
        patch.setattr(resharding, "MAX_EXTENT_BYTES", written_bytes)
        save(folder / "step-1", state(shapes), {"step": 1})
        reshard(folder / "step-1", folder / "a" / "step-1", first)
        done = reshard(folder / "a" / "step-1", folder / "b" / "step-1", second)
    assert (done.num_ranks_before, done.num_ranks) == (first, second)
    found = difference(folder / "step-1", folder / "b" / "step-1")
    assert found.is_bitwise_equal
    assert found.metadata == []
    assert verify_checkpoint(folder / "b" / "step-1").num_ranks == second
    target = state(shapes)
    assert load(folder / "b" / "step-1", target) == {"step": 1}


def test_rows_are_cut_as_fsdp_cuts_them(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"model": {"w": torch.arange(20.0).view(10, 2)}}, {})
    reshard(tmp_path / "step-1", tmp_path / "out", 4)
    index = read_index(tmp_path / "out")
    rows = []
    for rank in range(4):
        tensor = read_manifest(tmp_path / "out", index, rank).tensors.get("model/w")
        rows.append(sum(shard.shape[0] for shard in tensor.shards) if tensor else 0)
    assert rows == [len(chunk) for chunk in torch.arange(10).chunk(4)]


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"model": {"w": torch.ones(4)}}, {})
    path = tmp_path / "step-1" / "rank-00000.bin"
    path.write_bytes(bytes(16))
    with pytest.raises(DamagedCheckpoint):
        reshard(tmp_path / "step-1", tmp_path / "out" / "step-1", 2)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_and_a_running_run_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    save(run.checkpoint(1), {"model": {"w": torch.ones(4)}}, {"step": 1})
    run.manifest.write_text("{}")
    with pytest.raises(ConfigError, match="step-1 exists, and reshard never overwrites: name a new folder"):
        mw.checkpoints.reshard(run.checkpoint(1), run.checkpoint(1), ranks=2)
    descriptor = hold(run)
    with pytest.raises(ConfigError, match="into which another process trains"):
        mw.checkpoints.reshard(run.checkpoint(1), run.checkpoint(2), ranks=2)
    os.close(descriptor)
    assert "verified" in mw.checkpoints.reshard(run.checkpoint(1), tmp_path / "copy", ranks=2).table()
