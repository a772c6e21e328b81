"""difference: what changed between two checkpoints, whatever sharding saved them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import saving
from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.examine.difference import difference
from meshwright.errors import DamagedCheckpoint


def state(**changed: torch.Tensor) -> dict[str, Any]:
    return {"model": {"a": torch.arange(24.0).view(6, 4), "b": torch.ones(3), **changed}}


def test_equal_checkpoints_differ_in_metadata_alone(tmp_path: Path) -> None:
    save(tmp_path / "step-1", state(), {"step": 1, "position": {"seed": 0}})
    save(tmp_path / "step-2", state(), {"step": 2, "position": {"seed": 0}})
    found = difference(tmp_path / "step-1", tmp_path / "step-2")
    assert found.is_bitwise_equal
    assert found.num_equal == 2
    assert [(one.key, one.left, one.right) for one in found.metadata] == [("step", 1, 2)]


def test_changes_are_measured_and_named(tmp_path: Path) -> None:
    other = torch.arange(24.0).view(6, 4)
    other[5, 3] += 2
    other[0, 0] -= 1
    save(tmp_path / "step-1", state(old=torch.ones(1)), {})
    save(tmp_path / "step-2", state(a=other, b=torch.ones(4), new=torch.ones(1)), {})
    found = difference(tmp_path / "step-1", tmp_path / "step-2")
    assert (found.added, found.removed) == (["model/new"], ["model/old"])
    values, shape = found.changed
    assert (values.name, values.num_changed, values.num_elements) == ("model/a", 2, 24)
    assert (values.max_difference, values.mean_difference) == (2.0, pytest.approx(3 / 24))
    assert (shape.name, shape.what) == ("model/b", "float32 [3] to float32 [4]")


def test_bits_are_compared_and_not_values(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    save(tmp_path / "step-1", state(b=nan), {})
    save(tmp_path / "step-2", state(b=nan.clone()), {})
    save(tmp_path / "step-3", state(b=torch.tensor([float("nan"), -0.0, 1.0])), {})
    assert difference(tmp_path / "step-1", tmp_path / "step-2").is_bitwise_equal
    [change] = difference(tmp_path / "step-1", tmp_path / "step-3").changed
    assert (change.num_changed, change.max_difference) == (1, 0.0)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 23))
def test_the_shards_need_not_be_the_same(
    tmp_path_factory: pytest.TempPathFactory, first: int, second: int, position: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    other = torch.arange(24.0)
    other[position] = -1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "MAX_SHARD_BYTES", first)
        save(folder / "step-1", state(), {})
        patch.setattr(saving, "MAX_SHARD_BYTES", second)
        save(folder / "step-2", state(), {})
        save(folder / "step-3", state(a=other.view(6, 4)), {})
    assert difference(folder / "step-1", folder / "step-2").is_bitwise_equal
    [change] = difference(folder / "step-1", folder / "step-3").changed
    assert change.num_changed == 1
    assert change.max_difference == position + 1


def test_damage_is_not_a_difference(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", state(), {})
    path = tmp_path / "step-2" / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCheckpoint, match="do not match their hash"):
        difference(tmp_path / "step-1", tmp_path / "step-2")
