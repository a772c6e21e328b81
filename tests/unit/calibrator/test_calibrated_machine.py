"""What is measured is what training will have: the same threads for each rank."""

from __future__ import annotations

import pytest

from meshwright.calibrator.calibrated_machine import num_threads, this_machine
from meshwright.hardware.machine import num_usable_cores


def test_ranks_have_their_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert num_threads(1) == num_usable_cores()
    assert num_threads(10_000) == 1


@pytest.mark.parametrize(("chosen", "threads"), [("1", 1), ("3", 3)])
def test_threads_that_a_user_chose_are_measured(monkeypatch: pytest.MonkeyPatch, chosen: str, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert num_threads(2) == threads
    assert f"{threads} thread" in this_machine("cpu", 2, None).device.title


def test_what_is_no_number_of_threads_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert num_threads(num_usable_cores()) == 1
