"""save and load in one process: bit-equal, refused when damaged, nothing lost when a save fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from full_disk import no_file_larger_than
from meshwright.checkpoint.checkpoint import load, load_parameters, read_metadata, save
from meshwright.checkpoint.format.manifest import hash_bytes
from meshwright.checkpoint.prune import prune
from meshwright.errors import CheckpointError
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run

State = dict[str, Any]
METADATA = {"step": 20, "layout": {"dp_shard": 1}, "position": {"seed": 0, "loss": 1.5}}


def make_state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(8, 6, generator=generator) for name in ("a.weight", "b.weight")}
    optimizer = {name: {"exp_avg": weight * 2, "step": torch.tensor(20.0 + seed)} for name, weight in weights.items()}
    special = {
        "half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(2**40 + seed),
        "mask": torch.tensor([True, False, True]),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    return {"model": {**weights, **special}, "optimizer": optimizer}


def tensors_of(state: State) -> list[torch.Tensor]:
    return [t for value in state.values() for t in (tensors_of(value) if isinstance(value, dict) else [value])]


def zeroed(state: State) -> State:
    return {key: zeroed(value) if isinstance(value, dict) else torch.zeros_like(value) for key, value in state.items()}


def assert_same_bits(left: State, right: State) -> None:
    for a, b in zip(tensors_of(left), tensors_of(right), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints after steps 10 and 20."""
    run = Run(tmp_path / "run")
    save(run.checkpoint(10), make_state(1), {"step": 10})
    save(run.checkpoint(20), make_state(), METADATA)
    return run


def test_what_is_loaded_is_what_was_saved(run: Run) -> None:
    state = zeroed(make_state())
    assert load(run.checkpoint(20), state) == METADATA
    assert_same_bits(state, make_state())
    assert read_metadata(run.checkpoint(20)) == METADATA
    assert run.checkpoint_steps()[-1] == 20


def test_loading_is_in_place(run: Run) -> None:
    state = zeroed(make_state())
    before = [tensor.data_ptr() for tensor in tensors_of(state)]
    load(run.checkpoint(20), state)
    assert [tensor.data_ptr() for tensor in tensors_of(state)] == before


def test_one_section_can_be_loaded_alone(run: Run) -> None:
    state = {"model": zeroed(make_state())["model"]}
    load(run.checkpoint(20), state)
    assert_same_bits(state, {"model": make_state()["model"]})


def test_load_parameters_returns_the_model_or_the_names_asked_for(run: Run) -> None:
    assert_same_bits(load_parameters(run.checkpoint(20), list(make_state()["model"])), make_state()["model"])
    assert load_parameters(run.checkpoint(20)).keys() == make_state()["model"].keys()
    assert list(load_parameters(run.checkpoint(20), ["b.weight"])) == ["b.weight"]
    with pytest.raises(CheckpointError, match=r"holds no parameter c.weight: was it saved from another model"):
        load_parameters(run.checkpoint(20), ["c.weight", "a.weight"])


def test_a_run_without_checkpoints_has_no_steps(tmp_path: Path) -> None:
    assert Run(tmp_path).checkpoint_steps() == []
    with pytest.raises(CheckpointError, match="step-3 does not exist: there is no older checkpoint"):
        load(Run(tmp_path).checkpoint(3), make_state())


def test_an_existing_checkpoint_is_never_overwritten(run: Run) -> None:
    with pytest.raises(CheckpointError, match="step-20 exists, and checkpoints are never overwritten: resume from it"):
        save(run.checkpoint(20), make_state(5), METADATA)
    state = zeroed(make_state())
    load(run.checkpoint(20), state)
    assert_same_bits(state, make_state())
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-10", "step-20"]


def test_what_killed_saves_left_is_removed_by_the_next(run: Run) -> None:
    stale = run.checkpoints / ("step-30.tmp-" + "0" * 32)
    stale.mkdir()
    (stale / "rank-00000.bin").write_bytes(b"half a file")
    foreign = run.checkpoints / "notes.tmp-mine"
    foreign.mkdir()
    assert run.checkpoint_steps() == [10, 20]
    save(run.checkpoint(30), make_state(), METADATA)
    assert not stale.exists()
    assert foreign.exists()
    assert run.checkpoint_steps() == [10, 20, 30]


def test_prune_keeps_the_newest(run: Run) -> None:
    save(run.checkpoint(100), make_state(), METADATA)
    prune(run, RetentionRule(keep=2))
    assert run.checkpoint_steps() == [20, 100]
    prune(run, RetentionRule(keep=2))
    prune(run, RetentionRule(keep=1))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-100"]


def test_prune_says_what_it_cannot_remove(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    # A mount point, a file held open elsewhere, ...: here the older checkpoint is a file, which rmtree refuses.
    older = run.checkpoint(10)
    kept = run.folder / "kept"
    older.rename(kept)
    older.symlink_to(kept)
    prune(run, RetentionRule(keep=1))
    assert "could not be removed" in caplog.text
    assert "by hand" in caplog.text
    assert run.checkpoint_steps()[-1] == 20
    assert (kept / "checkpoint.json").is_file()


@pytest.mark.parametrize("remains", [0, 1, 0.5, -1])
def test_a_truncated_file_is_refused(run: Run, remains: float) -> None:
    path = run.checkpoint(20) / "rank-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * remains) if 0 < remains < 1 else int(remains)])
    with pytest.raises(
        CheckpointError, match=r"rank-00000.bin has \d+ bytes, \d+ were saved: a resume sets it aside and takes step-10"
    ):
        load(run.checkpoint(20), zeroed(make_state()))


@pytest.mark.slow
def test_every_flipped_byte_is_refused(run: Run) -> None:
    path = run.checkpoint(20) / "rank-00000.bin"
    data = path.read_bytes()
    for offset in range(0, len(data), 7):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :])
        with pytest.raises(CheckpointError, match=r"rank-00000.bin is damaged: bytes \d+ to \d+ \((model|optimizer)/"):
            load(run.checkpoint(20), zeroed(make_state()))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_index_is_refused_or_harmless(run: Run, position: float, bit: int) -> None:
    path = run.checkpoint(20) / "checkpoint.json"
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    original = path.read_bytes()
    path.write_bytes(data)
    state = zeroed(make_state())
    try:
        assert load(run.checkpoint(20), state) == METADATA
        assert_same_bits(state, make_state())
    except CheckpointError as error:
        assert "checkpoint.json is damaged" in str(error)  # noqa: PT017
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "rank-00000.bin").unlink(), "rank-00000.bin is missing"),
        (
            lambda folder: (folder / "checkpoint.json").unlink(),
            "has no checkpoint.json, so it is no complete checkpoint",
        ),
        (lambda folder: (folder / "checkpoint.json").write_text(""), "checkpoint.json is damaged"),
        (lambda folder: (folder / "checkpoint.json").write_text("[]"), "checkpoint.json is damaged"),
    ],
)
def test_a_missing_or_broken_file_is_refused(run: Run, damage: Callable[[Path], None], message: str) -> None:
    damage(run.checkpoint(20))
    with pytest.raises(CheckpointError, match=message + ".*a resume sets it aside and takes step-10"):
        load(run.checkpoint(20), zeroed(make_state()))


def test_load_parameters_verifies_what_it_returns(run: Run) -> None:
    path = run.checkpoint(20) / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"bytes 0 to 192 \(model/a.weight at \[0, 0\]\) do not match their hash"):
        load_parameters(run.checkpoint(20))
    path.write_bytes(data[:100])
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin is damaged"):
        load_parameters(run.checkpoint(20), ["b.weight"])


def test_files_of_another_save_are_refused(run: Run) -> None:
    other = (run.checkpoint(10) / "rank-00000.bin").read_bytes()
    (run.checkpoint(20) / "rank-00000.bin").write_bytes(other)
    with pytest.raises(CheckpointError, match="do not match their hash"):
        load(run.checkpoint(20), zeroed(make_state()))


def test_the_only_checkpoint_has_no_older_one_to_name(run: Run) -> None:
    (run.checkpoint(10) / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="no older checkpoint next to it: restore this folder from a copy"):
        load(run.checkpoint(10), zeroed(make_state()))


def test_another_format_version_is_named(run: Run) -> None:
    path = run.checkpoint(20) / "checkpoint.json"
    body = json.loads(path.read_text())["contents"] | {"format_version": 3}
    checksum = hash_bytes(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"checksum": checksum, "contents": body}))
    with pytest.raises(CheckpointError, match="format 3, but this version of meshwright reads 1 to 2"):
        load(run.checkpoint(20), zeroed(make_state()))


def test_another_model_is_refused_with_the_tensors_named(run: Run) -> None:
    state = zeroed(make_state())
    state["model"]["c.weight"] = torch.zeros(2)
    with pytest.raises(
        CheckpointError, match=r"lacks model/c.weight.*set \[model\] and \[optimizer\] to what they were"
    ):
        load(run.checkpoint(20), state)
    state = zeroed(make_state())
    del state["model"]["a.weight"]
    with pytest.raises(CheckpointError, match=r"holds model/a.weight, which this model"):
        load(run.checkpoint(20), state)
    state = zeroed(make_state())
    state["model"]["a.weight"] = torch.zeros(6, 8)
    with pytest.raises(CheckpointError, match=r"model/a.weight \(saved float32 \[8, 6\], now float32 \[6, 8\]\)"):
        load(run.checkpoint(20), state)
    state["model"]["a.weight"] = torch.zeros(8, 6, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"saved float32 \[8, 6\], now float64 \[8, 6\]"):
        load(run.checkpoint(20), state)


@pytest.mark.parametrize(("num_elements", "limit"), [(1000, 0), (1000, 100), (1000, 50_000), (1, 1000)])
def test_a_full_disk_loses_nothing(run: Run, num_elements: int, limit: int) -> None:
    """The limit hits the data file, or, where tensors are small, checkpoint.json."""
    state = {"model": {f"w{i}": torch.zeros(num_elements) for i in range(20)}}
    with no_file_larger_than(limit), pytest.raises(CheckpointError) as caught:
        save(run.checkpoint(30), state, {})
    assert str(caught.value).startswith("saving failed on rank 0: step-30 could not be written to")
    assert "(File too large); earlier checkpoints are untouched: free space there" in str(caught.value)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-10", "step-20"]
    load(run.checkpoint(20), zeroed(make_state()))
    save(run.checkpoint(30), state, {})


def test_a_folder_that_cannot_be_written_is_named(run: Run) -> None:
    blocker = run.folder / "file"
    blocker.write_text("")
    with pytest.raises(
        CheckpointError, match=r"step-5 could not be written to .*file \(.*\); earlier checkpoints are untouched"
    ):
        save(blocker / "step-5", make_state(), {})
