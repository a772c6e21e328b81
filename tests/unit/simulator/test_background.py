"""What other processes compute is what this one would have computed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from meshwright.simulator.background import LEAST_SIZE, in_background

WORDS = ["a", "few", "words"]


def length_and_process(word: str) -> tuple[int, int]:
    return len(word), os.getpid()


@pytest.mark.parametrize("size", [0, LEAST_SIZE])
def test_results_come_in_order(size: int) -> None:
    with in_background(length_and_process, WORDS, size) as found:
        lengths, processes = zip(*found(), strict=True)
    assert lengths == (1, 3, 5)
    is_forked = size >= LEAST_SIZE and (os.cpu_count() or 1) > 1
    assert (os.getpid() not in processes) == is_forked


@pytest.mark.parametrize("size", [0, LEAST_SIZE])
def test_an_error_is_raised_here(size: int) -> None:
    with in_background(int, WORDS, size) as found, pytest.raises(ValueError, match="invalid literal"):
        found()


@pytest.mark.timeout(60)
def test_processes_end_where_their_parent_keeps_going_after_sigterm() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with in_background(time.sleep, [3600.0, 3600.0], LEAST_SIZE):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
