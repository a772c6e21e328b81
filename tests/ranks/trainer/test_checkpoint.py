"""save and load on several ranks: bit-equal after any change of their number, one error for all of them."""

import hashlib
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hand_made
from full_disk import no_file_larger_than
from meshwright.checkpoint.checkpoint import load, load_parameters, save
from meshwright.errors import CheckpointError
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

METADATA = {"step": 2, "loss": 0.1}


def build(mesh_shape: tuple[int, ...] | None) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model whose sizes no number of ranks divides, two steps into training where it is sharded."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(1, 3))
    if mesh_shape is not None:
        names = ("dp_shard",) if len(mesh_shape) == 1 else ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return {"model": parameters, "optimizer": {name: optimizer.state[value] for name, value in parameters.items()}}


def train(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    for step in range(2):
        model(torch.full((2, 5), 0.5 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(state: dict[str, Any]) -> str:
    hasher = hashlib.sha256()
    for section in (state["model"], *state["optimizer"].values()):
        for name, value in sorted(section.items()):
            tensor: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
            hasher.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def train_and_save(folder: Path, mesh_shape: tuple[int, ...]) -> str:
    model, optimizer = build(mesh_shape)
    train(model, optimizer)
    save(folder, state_of(model, optimizer), METADATA if dist.get_rank() == 0 else {})
    assert (folder / "checkpoint.json").is_file()
    return digest(state_of(model, optimizer))


def load_and_save(folder: Path, target: Path | None, mesh_shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    model, optimizer = build(mesh_shape)
    state = state_of(model, optimizer)
    metadata = load(folder, state)
    if target is not None:
        save(target, state, METADATA)
    return digest(state), metadata


def load_fails(folder: Path) -> str:
    model, optimizer = build((dist.get_world_size(),))
    with pytest.raises(CheckpointError) as caught:
        load(folder, state_of(model, optimizer))
    return str(caught.value)


def save_with_a_full_disk_on(full_rank: int, folder: Path) -> str:
    model, optimizer = build((dist.get_world_size(),))
    disk = no_file_larger_than(64) if dist.get_rank() == full_rank else nullcontext()
    with disk, pytest.raises(CheckpointError) as caught:
        save(folder, state_of(model, optimizer), METADATA)
    dist.barrier()
    assert not folder.exists()
    # The same process can save again once there is room.
    save(folder, state_of(model, optimizer), METADATA)
    return str(caught.value)


def save_until_killed(folder: Path) -> None:
    model, optimizer = build((dist.get_world_size(),))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, state_of(model, optimizer), METADATA)


def save_sharded(folder: Path, layout: Layout) -> None:
    save(folder, hand_made.state(layout, factor=1.0), METADATA)


def load_sharded(folder: Path, layout: Layout) -> int:
    """Return how many tensors this rank has filled, all of them rightly."""
    state = hand_made.state(layout, factor=0.0)
    load(folder, state)
    hand_made.assert_state(state)
    return sum(len(copies) for copies in state["model"].values())


def load_without_the_last_stage(folder: Path) -> str:
    layout = Layout(pp=2, dp_shard=2)
    state = hand_made.state(layout, factor=0.0)
    for section in state.values():
        section.pop("blocks.3.norm", None)
    with pytest.raises(CheckpointError) as caught:
        load(folder, state)
    return str(caught.value)


SHARDED = [
    Layout(),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, tp=2),
    Layout(pp=2, tp=2, ep=2),
    Layout(pp=2, dp_shard=2, schedule="ZBVZeroBubble"),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(pp=2, dp_shard=2, tp=2, ep=2),
]


ALL_AXES = SHARDED[-1]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        # Without any axis, and with others.
        (ALL_AXES, [SHARDED[0], SHARDED[4]]),
        pytest.param(ALL_AXES, SHARDED[1:-1], marks=pytest.mark.long),
        *(pytest.param(one, [SHARDED[0], ALL_AXES], marks=pytest.mark.long) for one in SHARDED[:-1]),
    ],
    ids=str,
)
def test_what_any_layout_saves_any_other_loads(tmp_path: Path, saved: Layout, loaded: list[Layout]) -> None:
    folder = tmp_path / "step-2"
    run_ranks(save_sharded, saved.num_ranks, folder, saved)
    stored = load_parameters(folder)
    assert stored.keys() == hand_made.all_values().keys()
    assert all(torch.equal(stored[name], value) for name, value in hand_made.all_values().items())
    for layout in loaded:
        num_filled = run_ranks(load_sharded, layout.num_ranks, folder, layout)
        assert min(num_filled) > 0
    # Nothing is written twice, however many ranks hold it.
    num_bytes = sum(value.nbytes * 2 + 4 for value in hand_made.all_values().values())
    assert sum(path.stat().st_size for path in folder.glob("*.bin")) == num_bytes


def test_what_no_stage_has_is_missed_by_all(tmp_path: Path) -> None:
    layout = Layout(pp=2, dp_shard=2)
    run_ranks(save_sharded, 4, tmp_path / "step-2", layout)
    messages = set(run_ranks(load_without_the_last_stage, 4, tmp_path / "step-2"))
    assert len(messages) == 1
    assert "holds model/blocks.3.norm, optimizer/blocks.3.norm/exp_avg" in messages.pop()


def test_two_ranks_load_on_one_and_three_and_four_and_back(tmp_path: Path) -> None:
    first = tmp_path / "step-2"
    saved = set(run_ranks(train_and_save, 2, first, (2,)))
    assert len(saved) == 1
    expected = (saved.pop(), METADATA)
    assert run_ranks(load_and_save, 1, first, tmp_path / "one" / "step-2", (1,)) == [expected]
    assert (
        run_ranks(load_and_save, 3, tmp_path / "one" / "step-2", tmp_path / "three" / "step-2", (3,)) == [expected] * 3
    )
    assert (
        run_ranks(load_and_save, 4, tmp_path / "three" / "step-2", tmp_path / "four" / "step-2", (2, 2))
        == [expected] * 4
    )
    assert run_ranks(load_and_save, 2, tmp_path / "four" / "step-2", None, (2,)) == [expected] * 2

    model, optimizer = build(None)
    state = state_of(model, optimizer)
    assert load(first, state) == METADATA
    assert digest(state) == expected[0]
    assert all(torch.equal(value, state["model"][name]) for name, value in load_parameters(first).items())


def test_replicas_write_each_part_once(tmp_path: Path) -> None:
    run_ranks(train_and_save, 4, tmp_path / "step-2", (2, 2))
    model, _ = build(None)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    num_steps = len(list(model.parameters()))
    written = sum(path.stat().st_size for path in (tmp_path / "step-2").glob("*.bin"))
    assert written == 4 * (3 * num_elements + num_steps)


def test_damage_seen_by_one_rank_is_told_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "step-2"
    run_ranks(train_and_save, 2, folder, (2,))
    path = folder / "rank-00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0x10]))
    messages = set(run_ranks(load_fails, 2, folder))
    assert len(messages) == 1
    assert "rank-00001.bin is damaged" in messages.pop()
    path.write_bytes(data[:-1])
    messages = set(run_ranks(load_fails, 3, folder))
    assert len(messages) == 1
    assert f"rank-00001.bin has {len(data) - 1} bytes, {len(data)} were saved" in messages.pop()


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, full_rank: int) -> None:
    messages = set(run_ranks(save_with_a_full_disk_on, 2, full_rank, tmp_path / "step-2"))
    assert len(messages) == 1
    assert f"saving failed on rank {full_rank}: step-2 could not be written" in messages.pop()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_rank_killed_during_a_save_leaves_no_checkpoint_and_no_lasting_litter(tmp_path: Path) -> None:
    saved = run_ranks(train_and_save, 2, tmp_path / "step-2", (2,))
    with pytest.raises(AssertionError, match="killed by SIGKILL") as caught:
        run_ranks(save_until_killed, 2, tmp_path / "step-4")
    assert "CheckpointError" not in str(caught.value), "a lost peer is no broken checkpoint"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "step-2"
    assert all(name.startswith("step-4.tmp-") for name in names[1:])
    loaded = run_ranks(load_and_save, 2, tmp_path / "step-2", tmp_path / "step-4", (2,))
    assert [digest for digest, _ in loaded] == saved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4"]
