"""Commands that are asked for CUDA say in a line that there is none, before they start anything."""

from pathlib import Path

import pytest
import torch

from meshwright.cli.main import run

LAYOUT = "dp_shard=2"


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 500)
    (tmp_path / "job.toml").write_text(f'[data]\nsource = "corpus.txt"\n[layout]\n{LAYOUT}\n')
    monkeypatch.chdir(tmp_path)


def has_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["prove", "job.toml", LAYOUT, "--device", "cuda"], "--device cuda, but torch"),
        (["calibrate", "--device", "cuda"], "--device cuda, but torch"),
        (["train", "job.toml", "run.device=cuda"], 'run.device = "cuda" but torch'),
    ],
)
def test_a_machine_without_cuda_is_told_in_a_line(
    arguments: list[str], asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_devices(monkeypatch, 0)
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {asked}")
    assert "sees no CUDA device" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["prove", "job.toml", LAYOUT, "--device", "cuda"], ["train", "job.toml", "run.device=cuda"]]
)
def test_more_ranks_than_devices_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_devices(monkeypatch, 1)
    assert run(arguments) == 2
    assert "2 ranks need as many CUDA devices" in capsys.readouterr().err


def test_prove_takes_the_keys_that_other_verbs_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "job.toml", "layout.tp=3,layout.pp=9"]) == 2
    assert "tp=3" in capsys.readouterr().err
    assert run(["prove", "job.toml", "layout.tpx=3"]) == 2
    assert "unknown key tpx: did you mean tp?" in capsys.readouterr().err
