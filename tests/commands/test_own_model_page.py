"""The example of docs/how_to/own_model.md, as a reader copies it: trained, exported, imported, trained on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_models import require_transformers, their_logits
from meshwright.cli.main import run
from repository import ROOT


@pytest.mark.long
def test_the_page_works_as_it_is(tmp_path: Path) -> None:
    require_transformers()
    page = (ROOT / "docs" / "how_to" / "own_model.md").read_text(encoding="utf-8").partition("## To and from")[2]
    (tmp_path / "my_model.py").write_text(block(page, "python"), encoding="utf-8")
    (tmp_path / "job.toml").write_text(block(page, "toml"), encoding="utf-8")
    commands = [line.removeprefix("meshwright ") for line in block(page, "").splitlines()]
    assert [command.split()[0] for command in commands] == ["train", "export", "import", "train"]
    shown = [
        meshwright(tmp_path, command + " layout.dp_shard=2" * command.startswith("train"))
        for command in (*commands, "export runs/again exported-again")
    ]
    assert "on 2 cpu ranks" in shown[0]
    assert "logits equal those of transformers" in shown[1]
    assert "next: meshwright train runs/again/job.toml run.dir=NEW" in shown[2]
    # The step after the import starts at the loss that the first run ended at.
    assert first_loss(shown[3]) < first_loss(shown[0]) - 0.05
    assert their_logits(tmp_path / "exported", torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 257)
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("exported", "exported-again")]
    assert both[0] == both[1]


@pytest.mark.slow
def test_the_table_of_roles_trains_as_one_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "how_to" / "own_model.md").read_text(encoding="utf-8").partition("## Tensor parallelism")[2]
    (tmp_path / "my_model.py").write_text(block(page, "python"), encoding="utf-8")
    (tmp_path / "job.toml").write_text(
        '[model]\nsource = "my_model:Sharded"\n[data]\nsource = "stdlib"\n[train]\nsteps = 3\nseq_len = 32\n'
        "global_batch_size = 2\n[layout]\nmicrobatch_size = 2\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    # Training puts the folder of the job on the path, for good.
    monkeypatch.setattr(sys, "path", [*sys.path])
    losses = []
    for index, words in enumerate(("", "layout.tp=2 layout.loss_chunks=2")):
        # In this process, whose ranks are forked from one server: a command's own would import torch again.
        with pytest.raises(SystemExit) as end:
            run(["train", "job.toml", f"run.dir=run{index}", *words.split()])
        assert end.value.code == 0
        rows = map(json.loads, (tmp_path / f"run{index}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def meshwright(folder: Path, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command.split()], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_loss(shown: str) -> float:
    found = re.search(r"step 1/5  loss ([\d.]+)", shown)
    assert found is not None
    return float(found[1])


def block(page: str, language: str) -> str:
    """Return the first block of code in a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return next(text for kind, text in blocks if kind == language)
