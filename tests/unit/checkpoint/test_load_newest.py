"""load_newest goes back to the newest checkpoint that is whole, keeps damaged ones aside, and says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.checkpoint import load, load_newest, save
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.manifest import hash_bytes
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.spec.run.run import Run


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((4, 3), float(step)), "empty": torch.empty(0, 2)}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    for step in (10, 20, 30):
        save(run.checkpoint(step), state_of(step), {"step": step})
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def of_another_step(folder: Path, name: str) -> None:
    shutil.copy(folder.parent / "step-10" / name, folder / name)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped data": lambda folder: flip(folder / "rank-00000.bin"),
    "flipped manifest": lambda folder: flip(folder / "rank-00000.json"),
    "flipped index": lambda folder: flip(folder / "checkpoint.json"),
    "no data": lambda folder: (folder / "rank-00000.bin").unlink(),
    "no manifest": lambda folder: (folder / "rank-00000.json").unlink(),
    "no index": lambda folder: (folder / "checkpoint.json").unlink(),
    "data of another step": lambda folder: of_another_step(folder, "rank-00000.bin"),
    "manifest of another step": lambda folder: of_another_step(folder, "rank-00000.json"),
    "a copy of another step": lambda folder: (
        shutil.rmtree(folder),
        shutil.copytree(folder.parent / "step-10", folder),
    ),
    "a device as data": lambda folder: (
        (folder / "rank-00000.bin").unlink(),
        (folder / "rank-00000.bin").symlink_to("/dev/zero"),
    ),
    "empty data": lambda folder: (folder / "rank-00000.bin").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_newest_whole_one_is_loaded(
    run: Run, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    damage(run.checkpoint(30))
    with pytest.raises(DamagedCheckpoint):
        load(run.checkpoint(30), state_of(0))
    state = state_of(0)
    assert load_newest(run, state) == (20, {"step": 20})
    assert torch.equal(state["model"]["w"], state_of(20)["model"]["w"])
    assert "step-30 is skipped, and step-20 loaded" in caplog.text
    assert run.checkpoint_steps() == [10, 20]
    assert [path.name[:16] for path in run.checkpoints.glob("step-30*")] == ["step-30.damaged-"]
    save(run.checkpoint(30), state_of(30), {"step": 30})
    assert load_newest(run, state) == (30, {"step": 30})


def test_a_manifest_of_another_save_is_named(run: Run) -> None:
    of_another_step(run.checkpoint(20), "rank-00000.json")
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000.json is damaged \(it is of save [0-9a-f]{32}, not"):
        load(run.checkpoint(20), state_of(0))


def test_nothing_is_set_aside_where_all_are_damaged(run: Run) -> None:
    for step in (10, 20, 30):
        flip(run.checkpoint(step) / "rank-00000.bin")
    with pytest.raises(
        DamagedCheckpoint, match=r"(?s)no checkpoint of this run can be loaded:.*step-30.*step-10"
    ) as raised:
        load_newest(run, state_of(0))
    # It is the resume itself that speaks.
    assert "a resume" not in str(raised.value)
    assert str(raised.value).endswith("restore one of them from a copy, or start again with --overwrite")
    assert run.checkpoint_steps() == [10, 20, 30]


def test_another_job_is_no_damage(run: Run) -> None:
    with pytest.raises(CheckpointError, match="was saved with other sizes: model/w") as caught:
        load_newest(run, {"model": {"w": torch.zeros(2), "empty": torch.empty(0, 2)}})
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert load_newest(Run(run.folder / "none"), {}) is None


def test_a_tensor_without_one_of_its_shards_is_refused(run: Run) -> None:
    """Even where every checksum is right: the writer itself may have been wrong."""
    folder = run.checkpoint(20)
    manifest = json.loads((folder / "rank-00000.json").read_text())
    manifest["tensors"]["model/w"]["shards"][0]["shape"] = [3, 3]
    text = json.dumps(manifest)
    (folder / "rank-00000.json").write_text(text)
    index = json.loads((folder / "checkpoint.json").read_text())["contents"]
    index["ranks"][0]["manifest_xxh3_128"] = hash_bytes(text.encode())
    checksum = hash_bytes(json.dumps(index, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps({"checksum": checksum, "contents": index}))
    with pytest.raises(DamagedCheckpoint, match="is incomplete: model/w: 3 of 12 elements are missing"):
        load(folder, state_of(0))


def test_a_checkpoint_of_format_1_is_loaded(tmp_path: Path) -> None:
    weights = state_of(7)["model"]["w"]
    data = weights.numpy().tobytes()
    folder = tmp_path / "step-7"
    folder.mkdir()
    for rank, part in enumerate((data[:24], data[24:])):
        (folder / f"rank-0000{rank}.bin").write_bytes(part)
    chunks = [
        {"offsets": [rows, 0], "shape": [2, 3], "file": f"rank-0000{rank}.bin", "start": 0, "num_bytes": 24}
        | {"xxh3_128": hash_bytes(part)}
        for rank, rows, part in ((0, 0, data[:24]), (1, 2, data[24:]))
    ]
    body = {
        "format_version": 1,
        "save_id": "0" * 32,
        "metadata": {"step": 7},
        "file_bytes": {"rank-00000.bin": 24, "rank-00001.bin": 24},
        "tensors": {
            "model/w": {"dtype": "float32", "shape": [4, 3], "chunks": chunks},
            "model/empty": {"dtype": "float32", "shape": [0, 2], "chunks": []},
        },
    }
    checksum = hash_bytes(json.dumps(body, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps({"checksum": checksum, "contents": body}))
    state = state_of(0)
    assert load(folder, state) == {"step": 7}
    assert torch.equal(state["model"]["w"], weights)
    verified = verify_checkpoint(folder)
    assert (verified.damages, verified.num_bytes, verified.num_ranks) == ([], 48, 2)
