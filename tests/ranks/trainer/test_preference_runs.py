"""Runs of preference optimisation: exact resume, references of the start, adapters, held-out pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import DataError
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_ranks, train_on_this_rank

LORA = {"adapter": {"kind": "lora", "rank": 4}}


def pair_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job on 24 pairs, of which one text is upper case and preferred, six of them held out."""
    file = folder / "pairs.jsonl"
    if not file.exists():
        rows = ({"prompt": f"{n}: ", "chosen": f"AB{n % 5}C", "rejected": f"ab{n % 7}c"} for n in range(24))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own: dict[str, dict[str, Any]] = {
        "data": {"source": str(file), "packing": "whole", "mask_documents": True, "validation_fraction": 0.25},
        "train": {"task": "dpo", "steps": 6, "seq_len": 48, "global_batch_size": 4, "validation_interval": 3},
        "layout": {"microbatch_size": 1},
    }
    return tiny_job(folder, **{name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}})


def scores(folder: Path) -> np.ndarray:
    with np.load(folder / "reference.npz") as file:
        found: np.ndarray = file["scores"]
    return found


@pytest.mark.parametrize("adapter", [pytest.param({}, marks=pytest.mark.long), LORA], ids=["full", "lora"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(adapter: dict[str, Any], tmp_path: Path) -> None:
    whole = pair_job(tmp_path, **adapter)
    finished = train_on_ranks(whole, tmp_path / "whole", 2)
    assert finished.losses[1] == pytest.approx(math.log(2))  # the model is its own reference
    stopped = pair_job(tmp_path, train={"stop_after": 3}, **adapter)
    assert set(train_on_ranks(stopped, tmp_path / "stopped", 2).codes) == {75}
    scored_s = (tmp_path / "stopped/reference.npz").stat().st_mtime_ns
    resumed = train_on_ranks(whole, tmp_path / "stopped", 2, resume=True)
    assert resumed.parameter_hash == finished.parameter_hash
    assert resumed.losses == finished.losses
    columns = {"rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"}
    assert columns <= finished.rows[-1].keys()
    assert {f"validation_{name}" for name in columns} <= finished.validation[-1].keys()
    assert [row["validation_rewards/margin"] for row in resumed.validation[-1:]] == [
        row["validation_rewards/margin"] for row in finished.validation[-1:]
    ]
    assert (tmp_path / "stopped/reference.npz").stat().st_mtime_ns == scored_s


def mixed_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the job on its pairs and, twice as often, on shorter ones."""
    job = pair_job(folder, **sections)
    rows = ({"better": f"a{n}", "worse": f"b{n}"} for n in range(12))
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = {"source": str(folder / "short.jsonl"), "weight": 2.0, "chosen_key": "better", "rejected_key": "worse"}
    job["data"]["mixture"] = [{"source": job["data"].pop("source")}, short]
    return job


def test_a_mixture_is_scored_once_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    finished = train_on_ranks(mixed_job(tmp_path), tmp_path / "whole", 2)
    assert finished.losses[1] == pytest.approx(math.log(2))
    assert scores(tmp_path / "whole").shape == (36, 2)
    assert (scores(tmp_path / "whole") < 0).all()
    assert finished.rows[-1]["samples/short"] == 16
    train_on_ranks(mixed_job(tmp_path, train={"stop_after": 3}), tmp_path / "stopped", 1)
    scored_s = (tmp_path / "stopped/reference.npz").stat().st_mtime_ns
    resumed = train_on_ranks(mixed_job(tmp_path), tmp_path / "stopped", 1, resume=True)
    assert (tmp_path / "stopped/reference.npz").stat().st_mtime_ns == scored_s
    for step, loss in finished.losses.items():
        assert resumed.losses[step] == pytest.approx(loss, rel=1e-4), step
    assert resumed.validation[-1]["validation_rewards/margin"] == pytest.approx(
        finished.validation[-1]["validation_rewards/margin"], rel=1e-3
    )


@pytest.mark.long
def test_other_ranks_take_the_reference_of_the_start(tmp_path: Path) -> None:
    whole = pair_job(tmp_path, optimizer={"learning_rate": 1e-4})
    alone = train_on_ranks(whole, tmp_path / "one", 1)
    stopped = pair_job(tmp_path, train={"stop_after": 3}, optimizer={"learning_rate": 1e-4})
    train_on_ranks(stopped, tmp_path / "two", 2)
    np.testing.assert_allclose(scores(tmp_path / "two"), scores(tmp_path / "one"), rtol=1e-5)
    resumed = train_on_ranks(whole, tmp_path / "two", 1, resume=True)
    for step, loss in alone.losses.items():
        assert resumed.losses[step] == pytest.approx(loss, rel=1e-4), step
    assert resumed.rows[-1]["rewards/margin"] == pytest.approx(alone.rows[-1]["rewards/margin"], rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "dp_shard": 1}, pytest.param({"tp": 2, "dp_shard": 1}, marks=pytest.mark.long)],
    ids=["pp", "tp"],
)
def test_an_adapter_learns_which_answers_are_preferred(layout: dict[str, Any], tmp_path: Path) -> None:
    job = pair_job(tmp_path, train={"steps": 20}, optimizer={"learning_rate": 3e-2}, layout=layout, **LORA)
    job["checkpoint"]["interval"] = 20
    finished = train_on_ranks(job, tmp_path / "run", 2)
    assert finished.rows[-1]["loss"] < 0.4
    assert finished.rows[-1]["rewards/margin"] > 0
    (*_, last) = finished.validation
    assert last["validation_rewards/accuracy"] == 1.0


def resume_without(job: dict[str, Any], folder: str, what: str) -> str:
    """Return the error of resuming a run whose reference is missing or damaged."""
    file = Path(folder, "reference.npz")
    if what == "missing":
        file.unlink()
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        content = bytearray(file.read_bytes())
        content[200] ^= 1
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        train_on_this_rank(job, folder, True)
    return str(caught.value)


@pytest.mark.parametrize("what", ["missing", pytest.param("cut", marks=pytest.mark.long), "flipped"])
def test_a_run_without_its_reference_is_refused(what: str, tmp_path: Path) -> None:
    train_on_ranks(pair_job(tmp_path, train={"stop_after": 3}), tmp_path / "run", 1)
    (message,) = run_ranks(resume_without, 1, pair_job(tmp_path), str(tmp_path / "run"), what)
    assert "reference.npz is missing, damaged or of other pairs" in message


@pytest.mark.long
def test_a_start_that_was_interrupted_scores_other_weights_again(tmp_path: Path) -> None:
    train_on_ranks(pair_job(tmp_path, train={"stop_after": 1}), tmp_path / "first", 1)
    train_on_ranks(pair_job(tmp_path, train={"stop_after": 1, "seed": 1}), tmp_path / "second", 1)
    assert not np.allclose(scores(tmp_path / "first"), scores(tmp_path / "second"))
    # As if the second run had been killed before its first checkpoint, in a folder with scores of other weights.
    (tmp_path / "third").mkdir()
    (tmp_path / "third/reference.npz").write_bytes((tmp_path / "first/reference.npz").read_bytes())
    train_on_ranks(pair_job(tmp_path, train={"stop_after": 1, "seed": 1}), tmp_path / "third", 1)
    np.testing.assert_array_equal(scores(tmp_path / "third"), scores(tmp_path / "second"))
