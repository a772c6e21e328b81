"""The examples, trained by the real trainer on several ranks."""

import json
import sys
from pathlib import Path

import pytest

from meshwright.config.load import load_job
from repository import ROOT
from training_runs import train_on_ranks

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["spectral_denoiser", "hf_causal_lm"])
def test_a_model_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "hf_causal_lm":
        pytest.importorskip("transformers", reason="the example wraps a transformers model")
    # What `meshwright train` does for modules that lie next to the job file.
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
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
