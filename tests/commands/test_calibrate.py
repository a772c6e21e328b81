"""`meshwright calibrate`: what it refuses before it measures, and what a short run leaves behind."""

from pathlib import Path

import pytest
import torch

from meshwright.cli.main import run
from meshwright.hardware.catalogue import CATALOGUE_VARIABLE, load_cluster, load_device


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "100000"], "usable cores: set --ranks to"),
        (["--name", "My Machine"], "'My Machine' is no catalogue name"),
        (["--ranks", "0"], "--ranks"),
        (["--seconds", "0"], "--seconds"),
    ],
)
def test_what_cannot_be_measured_is_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["calibrate", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_a_file_that_somebody_wrote_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "devices" / "mine.toml"
    file.parent.mkdir()
    file.write_text('title = "by hand"\n')
    assert run(["calibrate", "--device", "cpu", "--out", str(tmp_path), "--name", "mine"]) == 2
    assert f"{file} was not written by calibrate" in capsys.readouterr().err
    assert file.read_text() == 'title = "by hand"\n'


@pytest.mark.long
def test_a_machine_is_measured_and_what_an_earlier_run_wrote_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "devices").mkdir()
    earlier = "# Written by `meshwright calibrate`, which replaces it when it runs again.\nno longer true\n"
    (tmp_path / "devices" / "cpu-local.toml").write_text(earlier)
    assert run(["calibrate", "--device", "cpu", "--ranks", "1", "--out", str(tmp_path), "--seconds", "1"]) == 0
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(tmp_path))
    device, cluster = load_device("cpu-local"), load_cluster("cpu-local")
    assert cluster.device == device
    assert device.is_host
    assert device.measured_matmul_flops_per_s.float32 is not None
