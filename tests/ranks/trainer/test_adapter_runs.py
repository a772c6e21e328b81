"""Runs that train an adapter: resumed to the bit, on other ranks, and refused where the adapter is another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.checkpoint import saved_tensors
from meshwright.inference.loaded_model import load_model
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job, train_on_ranks

TOKENS = torch.arange(32)[None] * 5

DORA = {"kind": "dora", "rank": 4}


def job_of(folder: Path, **sections: Any) -> dict[str, Any]:
    return tiny_job(folder, **{"adapter": DORA, "run": {"parameter_hash": True}, **sections})


def test_a_stopped_run_resumes_to_the_bit_and_on_other_ranks(tmp_path: Path) -> None:
    adapter = {**DORA, "dropout": 0.2}
    layout = {"activation_checkpoint": "full"}
    job = job_of(tmp_path, adapter=adapter, layout=layout)
    whole = train_on_ranks(job, tmp_path / "whole", 2)
    stopped = job_of(tmp_path, adapter=adapter, layout=layout, train={"stop_after": 3})
    train_on_ranks(stopped, tmp_path / "same", 2)
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    same = train_on_ranks(job, tmp_path / "same", 2, resume=True)
    assert same.parameter_hash == whole.parameter_hash
    assert same.losses == whole.losses
    other = train_on_ranks(job, tmp_path / "other", 1, resume=True)
    for step in (4, 5, 6):
        assert other.losses[step] == pytest.approx(whole.losses[step], rel=1e-5)


def test_a_checkpoint_holds_the_base_and_the_states_of_the_adapter_alone(tmp_path: Path) -> None:
    """A resume reads no other folder: the base in the checkpoint is that of the run."""
    train_on_ranks(job_of(tmp_path, train={"steps": 3}), tmp_path / "run", 2)
    names = saved_tensors(Run(tmp_path / "run").checkpoint(3))
    of_optimizer = {name.split("/")[1] for name in names if name.startswith("optimizer/")}
    of_model = {name.split("/")[1] for name in names if name.startswith("model/")}
    assert of_optimizer == {name for name in of_model if name.endswith(("lora_a", "lora_b", "magnitude"))}
    assert "blocks.0.attention.query.weight" in of_model
    assert "embedding.weight" in of_model


@pytest.mark.long
def test_bfloat16_trains_an_adapter_close_to_float32(tmp_path: Path) -> None:
    wide, narrow = (
        train_on_ranks(job_of(tmp_path, precision={"compute": compute}), tmp_path / compute, 2)
        for compute in ("float32", "bfloat16")
    )
    assert narrow.losses[6] == pytest.approx(wide.losses[6], rel=5e-3)
    assert narrow.losses[1] != wide.losses[1]


def test_a_run_keeps_its_adapter(tmp_path: Path) -> None:
    train_on_ranks(job_of(tmp_path, train={"stop_after": 3}), tmp_path / "run", 1)
    other = job_of(tmp_path, adapter={**DORA, "alpha": 8.0})
    with pytest.raises(AssertionError, match=r"adapter\.alpha was 32\.0, is 8\.0"):
        train_on_ranks(other, tmp_path / "run", 1, resume=True)


@pytest.mark.parametrize(
    "base_dtype",
    [*(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("compute", "bfloat16", "int8")), "nf4"],
)
def test_generation_computes_what_training_did(tmp_path: Path, base_dtype: str) -> None:
    """A checkpoint holds the base in its bits; it is read as a plain model with the adapter added to its weights."""
    adapter = {**DORA, "base_dtype": base_dtype}
    options = {**TINY_MODEL["options"], "dim": 64, "ffn_dim": 128, "head_dim": 16}
    job = job_of(tmp_path, adapter=adapter, model={"options": options}, optimizer={"learning_rate": 0.03})
    train_on_ranks(job, tmp_path / "run", 2)
    (theirs,) = run_ranks(logits_of_training, 1, job, str(tmp_path / "run"))
    note = mw.export(tmp_path / "run", tmp_path / "peft").note
    assert ("--merge" in note) is (base_dtype != "compute")
    with torch.inference_mode():
        ours = load_model(tmp_path / "run", device=torch.device("cpu")).model(TOKENS).numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def logits_of_training(job: dict[str, Any], folder: str) -> np.ndarray[Any, Any]:
    training = Training.build(Job.from_dict(job), Ranks(0, 1, torch.device("cpu")), awaits_state=True)
    assert training.load_newest(Run(folder)) == 6
    with torch.no_grad():
        return np.asarray(training.model[0].eval()(TOKENS))
