"""Numbers in words: three digits in a unit that fits them."""

from __future__ import annotations

import pytest

from meshwright.units import GiB, format_bytes, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (12.3e-6, "12.3 us"), (999.7e-6, "1 ms"), (0.9996, "1 s"), (3.21, "3.21 s"), (3725.0, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(999.4 * GiB, "999 GiB"), (999.9 * GiB, "1000 GiB"), (1536, "1.5 KiB")])
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text
