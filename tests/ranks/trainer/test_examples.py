"""The examples, trained by the real trainer on several ranks."""

import json
import os
import sys
from pathlib import Path

import pytest

from meshwright.config.load import load_job
from repository import ROOT
from training_runs import train_on_ranks

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["spectral_denoiser", pytest.param("hf_causal_lm", marks=pytest.mark.long)])
def test_a_model_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "hf_causal_lm":
        pytest.importorskip("transformers", reason="the example wraps a transformers model")
    # What `meshwright train` does for modules that lie next to the job file.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *sys.path]))
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    job = load_job(EXAMPLES / f"{name}.toml", ["train.steps=12", "run.device=cpu", f"data.cache_dir={tmp_path}"]).job
    finished = train_on_ranks(job.to_dict(), tmp_path / "run", 2)
    assert finished.codes == [0, 0]
    assert finished.losses[12] < 0.9 * finished.losses[1]
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.long
def test_a_mixture_on_all_axes_learns_and_says_how_its_tokens_went(tmp_path: Path) -> None:
    words = ["run.device=cpu", f"data.cache_dir={tmp_path}", "train.steps=8", "train.seq_len=32", "layout.pp=2"]
    job = load_job(EXAMPLES / "tiny-moe.toml", [*words, "layout.tp=2", "layout.cp=2", "layout.ep=4"]).job
    finished = train_on_ranks(job.to_dict(), tmp_path / "run", 8)
    assert finished.codes == [0] * 8
    assert finished.losses[8] < 0.8 * finished.losses[1]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if "router_skew" in row):
        assert 1 <= row["router_skew_mean"] <= row["router_skew"] <= 8
        assert row["balance_loss"] >= 1
        assert row["tokens_dropped"] == 0
    assert sum("router_skew" in row for row in rows) == 8


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_graph_learns_and_resumes_to_the_bit_with_any_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *sys.path]))
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    words = ["train.steps=12", "run.device=cpu", "train.validation_interval=0", "checkpoint.interval=5"]
    words += ["data.options.num_nodes=1000", "train.global_batch_size=64", "layout.microbatch_size=32"]
    found = []
    for workers, stop_after in ((0, None), (num_workers, 7)):
        more = [f"data.num_workers={workers}"] + ([] if stop_after is None else [f"train.stop_after={stop_after}"])
        folder = tmp_path / f"{stop_after}"
        job = load_job(EXAMPLES / "graph_nodes.toml", [*words, *more]).job.to_dict()
        finished = train_on_ranks(job, folder, 2)
        if stop_after is not None:
            job["train"]["stop_after"] = None
            finished = train_on_ranks(job, folder, 2, resume=True)
        found.append(finished)
    assert found[0].losses[12] < 0.9 * found[0].losses[1]
    assert found[0].losses == found[1].losses
    assert found[0].parameter_hash == found[1].parameter_hash


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("source", ["loader", pytest.param("graph", marks=pytest.mark.long)])
def test_a_loader_of_torchdata_is_saved_and_restored_mid_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    pytest.importorskip("torchdata.nodes", reason="the example is made of torchdata's loaders")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *sys.path]))
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    words = ["train.steps=10", "checkpoint.interval=20", f"data.source=torchdata_streams:{source}", "run.device=cpu"]
    # An epoch is 5 batches: the run stops in the second, and continues to the third.
    words += ["data.options.num_samples=40", "data.options.seq_len=32", "train.seq_len=32", "train.global_batch_size=8"]
    words += ["model.options.num_layers=1", "layout.microbatch_size=2"]
    job = load_job(EXAMPLES / "torchdata_streams.toml", words).job.to_dict()
    whole = train_on_ranks(job, tmp_path / "whole", 2)
    stopping = {**job, "train": {**job["train"], "stop_after": 7}}
    train_on_ranks(stopping, tmp_path / "parts", 2)
    resumed = train_on_ranks(job, tmp_path / "parts", 2, resume=True)
    assert resumed.losses == whole.losses
    assert resumed.parameter_hash == whole.parameter_hash
