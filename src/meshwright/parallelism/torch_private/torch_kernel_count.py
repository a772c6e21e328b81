"""Counting the kernels of a program, by torch's dispatcher, which is no public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def count_kernels(call: Callable[[], object]) -> int:
    """Return how many operations `call` runs that compute something: views of a tensor do not."""
    counter = _Counter()  # type: ignore[no-untyped-call]
    with counter:
        call()
    return int(counter.count)


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
