"""Numbers in words: three digits in a unit that fits them."""

from __future__ import annotations

import pytest

from meshwright.units import GiB, counted, format_bytes, format_duration, format_duration_range


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (12.3e-6, "12.3 us"), (999.7e-6, "1 ms"), (0.9996, "1 s"), (3.21, "3.21 s"), (3725.0, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [(0.0, 5e-6, "0 to 5 us"), (2059.0, 2975.0, "34.3 to 49.6 min"), (50.0, 61.0, "0.833 to 1.02 min")],
)
def test_a_range_of_durations_has_one_unit(low_s: float, high_s: float, text: str) -> None:
    assert format_duration_range(low_s, high_s) == text


def test_only_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "microbatch", "microbatches") == "3 microbatches"


@pytest.mark.parametrize(("size", "text"), [(999.4 * GiB, "999 GiB"), (999.9 * GiB, "1000 GiB"), (1536, "1.5 KiB")])
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text
