"""Numbers in words: three digits in a unit that fits them."""

from __future__ import annotations

import pytest

from meshwright.units import GiB, counted, format_bytes, format_duration, format_interval


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (12.3e-6, "12.3 us"), (999.7e-6, "1 ms"), (0.9996, "1 s"), (3.21, "3.21 s"), (3725.0, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("duration_s", "error", "step", "text"),
    [
        (2.5e-6, 1.2, "2.5 us", "0 to 5.5 us"),
        (53.9, 0.25, "53.9 s", "40.4 to 67.4 s"),
        (2500.0, 0.2, "41.7 min", "33.3 to 50 min"),
        (0.9996, 0.1, "1 s", "0.9 to 1.1 s"),
        (0.903, 0.25, "903 ms", "677 to 1,129 ms"),
    ],
)
def test_a_duration_and_its_interval_have_one_unit(duration_s: float, error: float, step: str, text: str) -> None:
    assert format_interval(duration_s, error) == (step, text)


def test_only_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "microbatch", "microbatches") == "3 microbatches"


@pytest.mark.parametrize(("size", "text"), [(999.4 * GiB, "999 GiB"), (999.9 * GiB, "1000 GiB"), (1536, "1.5 KiB")])
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text
