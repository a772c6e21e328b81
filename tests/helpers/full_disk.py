"""A disk that becomes full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Fail writes in mid-file as a full disk does: the kernel refuses them beyond `num_bytes`.

    Python ignores the signal that comes with it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
