"""calibrate on a CUDA device: skipped, with the reason, where there is none."""

import os
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import run
from meshwright.hardware.catalogue import CATALOGUE_VARIABLE, load_cluster
from meshwright.hardware.rates import attention_rates, matmul_rates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    pytest.mark.timeout(600),
]


def test_a_cuda_device_is_measured_and_keeps_its_datasheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["calibrate", "--device", "cuda", "--name", "mine", "--out", str(tmp_path), "--seconds", "20"]) == 0
    monkeypatch.setitem(os.environ, CATALOGUE_VARIABLE, str(tmp_path))
    device = load_cluster("mine").device
    assert not device.is_host
    assert matmul_rates(device, "bfloat16") is not None
    assert None not in attention_rates(device, "bfloat16")
    measured, promised = device.measured_matmul_flops_per_s.bfloat16, device.peak_flops_per_s("bfloat16")
    assert measured is not None
    if promised is not None:
        assert 0.3 * promised < measured.value < 1.05 * promised
