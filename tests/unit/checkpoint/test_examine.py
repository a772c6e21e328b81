"""Checkpoints examined without loading them: state, damage, contents and statistics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.examine.contents import summarize
from meshwright.checkpoint.examine.describe_run import describe_run
from meshwright.checkpoint.examine.tensor_statistics import detail_of
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.prune import prune
from meshwright.errors import ConfigError
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).view(3, 4), "nan": torch.tensor([1.0, float("nan"), -2.0, float("inf"), 0.0])},
    "optimizer": {"w": {"step": torch.tensor(3.0)}},
}
ID = "0" * 32


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints after steps 10 and 20, the first with the lower validation loss."""
    run = Run(tmp_path / "run")
    for step, loss in ((10, 1.0), (20, 2.0)):
        save(run.checkpoint(step), STATE, {"step": step, "validation_loss": loss})
    return run


def test_an_intact_checkpoint_has_no_damage(run: Run) -> None:
    found = verify_checkpoint(run.checkpoint(20))
    assert found.damages == []
    assert (found.step, found.num_tensors, found.num_shards, found.num_ranks) == (20, 3, 3, 1)
    assert found.num_bytes == 12 * 4 + 5 * 4 + 4


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_bit_is_found_and_its_place_named(run: Run, data: st.DataObject) -> None:
    folder = run.checkpoint(20)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    intact = path.read_bytes()
    position = data.draw(st.integers(0, len(intact) - 1))
    flipped = bytearray(intact)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    try:
        damages = verify_checkpoint(folder).damages
    finally:
        path.write_bytes(intact)
    [damage] = damages
    assert damage.file == path.name
    if path.suffix == ".bin":
        assert damage.rank == 0
        assert damage.tensor is not None
        assert damage.start is not None
        assert damage.num_bytes is not None
        assert damage.start <= position < damage.start + damage.num_bytes


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000.json", "rank-00000.bin"])
def test_a_missing_file_is_damage_and_listed_as_such(run: Run, name: str) -> None:
    (run.checkpoint(20) / name).unlink()
    [damage] = verify_checkpoint(run.checkpoint(20)).damages
    assert damage.file == name
    records = describe_run(run, RetentionRule(), is_running=False)
    assert [one.state for one in records] == ["complete", "damaged"]
    assert name in str(records[1].problem)


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000.json", "rank-00000.bin"])
def test_a_pipe_is_damage_and_is_not_waited_for(run: Run, name: str) -> None:
    (run.checkpoint(20) / name).unlink()
    os.mkfifo(run.checkpoint(20) / name)
    [damage] = verify_checkpoint(run.checkpoint(20)).damages
    assert (damage.file, "is no file" in damage.what) == (name, True)


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000.json"])
def test_json_without_end_is_damage_of_one_checkpoint(run: Run, name: str) -> None:
    (run.checkpoint(20) / name).write_text("[" * 100_000)
    [damage] = verify_checkpoint(run.checkpoint(20)).damages
    assert damage.file == name
    assert [one.step for one in describe_run(run, RetentionRule(), is_running=False)] == [10, 20]


def test_all_damage_is_reported(run: Run) -> None:
    path = run.checkpoint(20) / "rank-00000.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    damages = verify_checkpoint(run.checkpoint(20)).damages
    assert {str(damage.tensor).split(" ")[0] for damage in damages} == {"model/w", "model/nan", "optimizer/w/step"}


def test_a_truncated_file_names_the_tensors_that_it_lacks(run: Run) -> None:
    path = run.checkpoint(20) / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    damages = verify_checkpoint(run.checkpoint(20)).damages
    assert [damage.what for damage in damages] == ["has 70 bytes, 72 were saved", "2 bytes are missing"]


def test_files_of_another_save_are_damage(run: Run) -> None:
    for name in ("rank-00000.json", "rank-00000.bin"):
        (run.checkpoint(20) / name).write_bytes((run.checkpoint(10) / name).read_bytes())
    [damage] = verify_checkpoint(run.checkpoint(20)).damages
    assert "of save" in damage.what


def test_a_renamed_checkpoint_is_damage(run: Run) -> None:
    run.checkpoint(20).rename(run.checkpoint(30))
    [damage] = verify_checkpoint(run.checkpoint(30)).damages
    assert "its metadata is of step 20" in damage.what


def test_states_and_reasons_are_listed(run: Run) -> None:
    for name in (f"step-30.tmp-{ID}", f"step-15.damaged-{ID}"):
        (run.checkpoints / name).mkdir()
    rule = RetentionRule(keep=1, keep_best=1)
    states = {one.name: (one.state, one.kept_because) for one in describe_run(run, rule, is_running=False)}
    assert states == {
        "step-10": ("complete", ["keep_best"]),
        f"step-15.damaged-{ID}": ("set aside", []),
        "step-20": ("complete", ["keep"]),
        f"step-30.tmp-{ID}": ("leftover", []),
    }
    records = describe_run(run, rule, is_running=True, now_s=lambda: 1e12)
    assert records[-1].state == "being written"
    assert records[0].age_s > 1e9


def test_a_cut_off_index_that_was_set_aside_needs_no_repair(run: Run) -> None:
    aside = run.checkpoints / f"step-10.damaged-{ID}"
    run.checkpoint(10).rename(aside)
    (aside / "checkpoint.json").write_bytes((aside / "checkpoint.json").read_bytes()[:94])
    first, second = describe_run(run, RetentionRule(keep=2), is_running=False)
    assert (first.state, second.state) == ("set aside", "complete")
    path = aside / "checkpoint.json"
    end = "is damaged (cut off after 94 bytes): no resume reads it: it was set aside, and may be deleted"
    assert first.problem == f"{path} {end}"


def test_prune_keeps_what_the_rule_names_and_what_is_in_use(run: Run) -> None:
    save(run.checkpoint(30), STATE, {"step": 30})
    assert prune(run, RetentionRule(keep=1, keep_best=1), in_use=[20]) == []
    assert prune(run, RetentionRule(keep=1, keep_best=1)) == [20]
    assert run.checkpoint_steps() == [10, 30]
    assert prune(run, RetentionRule(keep=1)) == [10]
    assert prune(run, RetentionRule(keep=1)) == []


def test_what_a_checkpoint_holds(run: Run) -> None:
    found = summarize(run.checkpoint(20))
    assert found.metadata == {"step": 20, "validation_loss": 2.0}
    assert found.bytes_by_section == {"model": 68, "optimizer": 4}
    assert found.bytes_by_dtype == {"float32": 72}
    assert [one.name for one in found.tensors] == ["model/nan", "model/w", "optimizer/w/step"]
    assert json.loads(found.to_json())["save_id"] == found.save_id


def test_statistics_of_a_tensor_leave_out_what_is_not_finite(run: Run) -> None:
    found = detail_of(run.checkpoint(20), "nan").statistics
    assert (found.minimum, found.maximum, found.mean) == (-2.0, 1.0, pytest.approx(-1 / 3))
    assert (found.num_nan, found.num_infinite, found.num_zero, found.num_elements) == (1, 1, 1, 5)
    with pytest.raises(ConfigError, match="no tensor weights"):
        detail_of(run.checkpoint(20), "weights")
