"""The examples that bring their own model, trained by the real trainer on two ranks."""

import sys
from pathlib import Path

import pytest

from meshwright.config.load import load_job
from training_runs import train_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["spectral_denoiser", "hf_causal_lm"])
def test_a_model_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "hf_causal_lm":
        pytest.importorskip("transformers", reason="the example wraps a transformers model")
    # What `meshwright train` does for modules that lie beside the job file.
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    job = load_job(EXAMPLES / f"{name}.toml", ["train.steps=12", "run.device=cpu", f"data.cache_dir={tmp_path}"]).job
    finished = train_on_ranks(job.to_dict(), tmp_path / "run", 2)
    assert finished.codes == [0, 0]
    assert finished.losses[12] < 0.9 * finished.losses[1]
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
