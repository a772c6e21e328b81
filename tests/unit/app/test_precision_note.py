"""A job that computes in float32 because that is the default says so where tensor cores are left unused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.app.job.summary import precision_note
from meshwright.app.train import _note_precision
from meshwright.cli.main import run
from meshwright.config.load import load_job
from meshwright.hardware.catalogue import load_device
from meshwright.trainer.launch import ranks

NOTE = "precision.compute is float32, the default: h100-sxm computes matmuls 14.8 times as fast in bfloat16"
OF_CLUSTER = "[cluster]\nname = 'h100-ib400'\nnum_devices = 8\n[layout]\ndp_shard = 8\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text("[model]\nsource = 'llama3-8b'\n[train]\nglobal_batch_size = 8\n" + OF_CLUSTER)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "override", "times"),
    [
        ("check", (), 1),
        ("check", ("precision.compute=float32",), 0),
        ("check", ("precision.compute=bfloat16",), 0),
        ("plan", (), 1),
        pytest.param("plan", ("precision.compute=float32",), 0, marks=pytest.mark.long),
        pytest.param("plan", ("precision.compute=bfloat16",), 0, marks=pytest.mark.long),
    ],
)
def test_a_cluster_with_tensor_cores_is_hinted_at_in_one_line(
    verb: str,
    override: tuple[str, ...],
    times: int,
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    run([verb, str(job), *override])
    assert capsys.readouterr().out.count(NOTE) == times


def test_a_processor_and_a_format_without_tensor_cores_are_not_hinted_at(job: Path) -> None:
    assert precision_note(load_job(job), load_device("v100-sxm-32gb")) is None
    assert precision_note(load_job(job), load_device("h100-sxm")) is not None


def test_training_on_such_a_gpu_says_so(
    job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "choose_device_type", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("meshwright.app.train.progress.propagate", True)
    caplog.set_level("INFO", "meshwright.progress")
    _note_precision(load_job(job))
    assert NOTE in caplog.text
