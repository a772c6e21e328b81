"""byte_counter(): how far a pass over text has come."""

import time
from collections.abc import Callable

from meshwright.units import format_bytes, format_duration


def byte_counter(text: str, total_bytes: int | None, show: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that adds bytes of text and shows their sum, and of a known total the time that is left."""
    start_s, done_bytes = time.perf_counter(), 0

    def add(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if total_bytes is None:
            show(f"{text}: {format_bytes(done_bytes)}")
            return
        left_s = (time.perf_counter() - start_s) * (total_bytes - done_bytes) / max(1, done_bytes)
        of_all = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        show(f"{text}: {of_all}, about {format_duration(left_s)} left")

    return add
