"""kept_garbage: Python looks for no cycles of objects while an answer is computed or a large package imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_garbage() -> Iterator[None]:
    """Collect no garbage within, and never what exists at its end.

    A tenth of a plan's second would go into looking for it, and seconds of a simulation with millions of records; and
    some more when the process ends, unless what exists by then is known to stay. Of a rank that imports torch, takes
    two steps and ends, it is a third (3.8 s of processor time, 2.5 s so; torch 2.13, 2026-11-25).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
