"""Which tensors are in managed memory: marks on their storages, which the tracer reads.

A trace under fake tensors allocates nothing, so that it learns only here which kernels use the link to the host.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_storages: dict[int, "weakref.ref[torch.UntypedStorage]"] = {}
"""By address the storages that are managed."""
_depth = [0]
"""Number of open `marking` contexts."""


@contextmanager
def marking() -> Iterator[None]:
    """Let every tensor count as managed that is made within the context; `mark` those that are to stay so."""
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1


def mark(tensor: Tensor) -> None:
    """Register the storage of a plain tensor, for as long as it lives."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _storages[key] = weakref.ref(storage, lambda _: _storages.pop(key, None))


def is_managed(tensor: Tensor) -> bool:
    """Return whether a plain tensor is in managed memory."""
    return bool(_depth[0]) or (bool(_storages) and tensor.untyped_storage()._cdata in _storages)


def managed_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of those of `tensors` that are in managed memory."""
    if not (_storages or _depth[0]):
        return 0
    return sum(tensor.nbytes for tensor in tensors if is_managed(tensor))
