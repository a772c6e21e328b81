"""A simulated step against a real one on a GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulated_gpu_step import CASES, PEAK_BAR, local_gpu, measured, simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        local_gpu() is None, reason="needs a CUDA device that the catalogue knows; this machine has none"
    ),
    pytest.mark.timeout(900),
]


def test_peak_memory_is_the_real_one_and_the_step_is_near(tmp_path: Path) -> None:
    device = local_gpu()
    assert device is not None
    expected, found = simulated(CASES[0], device), measured(CASES[0], 12, tmp_path / "run")
    assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=PEAK_BAR)
    # The benchmark's bar is for a GPU that nothing else uses.
    assert expected.step_s == pytest.approx(found.step_s, rel=0.25)
