"""The example of preference optimisation, as a user calls the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from repository import ROOT
from training_runs import TINY_MODEL

EXAMPLE = str(ROOT / "examples" / "tiny-dpo.toml")
SMALL = [f"model.options.{key}={value}" for key, value in TINY_MODEL["options"].items()]


@pytest.mark.slow
def test_held_out_pairs_are_told_apart(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "run.device=cpu"]
    with pytest.raises(SystemExit) as end:
        run(["train", EXAMPLE, *words, *SMALL, "optimizer.learning_rate=1e-2"])
    assert end.value.code == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["rewards/margin"] == pytest.approx(0.0, abs=1e-4)
    held_out = [row["validation_rewards/accuracy"] for row in rows if "validation_loss" in row]
    assert held_out[-1] > 0.8


def test_check_says_what_the_reference_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "dpo.label_smoothing=0.1"]
    assert run(["check", EXAMPLE, *words]) == 0
    assert "sigmoid loss, beta 0.1, label smoothing 0.1; the reference is the model" in capsys.readouterr().out


def test_scoring_the_reference_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"run.dir={tmp_path / 'run'}",
        "model.source=llama3-8b",
        "precision.compute=bfloat16",
        "train.seq_len=2048",
        "train.global_batch_size=8",
    ]
    assert run(["check", EXAMPLE, *words, "cluster.name=h100", "cluster.num_devices=8", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["figures"]["reference_scoring_s"] > 0
    assert any("forward only: about" in text and "for 36 pairs" in text for _, text in checked["lines"])
    assert run(["plan", EXAMPLE, *words, "--cluster", "h100:8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference_scoring_s"] > 0
    gone = [*words, f"data.source={tmp_path / 'gone.jsonl'}", "--cluster", "h100:8"]
    assert run(["plan", EXAMPLE, *gone]) == 0
    assert "before the first step, not priced" in " ".join(capsys.readouterr().out.split())
