"""BlockActivations: what one forward of a block saved for backward, by storage, on the device, on the host, or on both.

Tensors that share a storage are views of one copy of it, so that a tensor that is saved twice is copied once. Handles,
which autograd keeps in place of the tensors, own the storages: backward frees them one by one, as it would tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.errors import UnsupportedError
from meshwright.parallelism.torch_private.torch_dispatch import storage_identity, wraps_tensors
from meshwright.units import KiB

SMALLEST_BYTES = 16 * KiB
"""Storages of fewer bytes stay on the device: a copy of them takes longer to start than to run."""


class SavedStorage:
    """A storage that was saved."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin with that of `tensor`, on its device."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.on_device: Tensor | None = tensor.as_strided((elements,), (1,), 0)
        self._on_host: Tensor | None = None
        self._version: int | None = tensor._version

    def copy_to_host(self) -> int:
        """Start its copy to the host on the current stream, and return its bytes."""
        source = self.on_device
        assert source is not None
        is_apart = source.device.type != "cpu"
        self._on_host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=is_apart)
        self._on_host.copy_(source, non_blocking=True)
        return source.nbytes

    def allocate(self, device: torch.device) -> None:
        """Give it memory on the device again, of the current stream."""
        assert self._on_host is not None
        self.on_device = torch.empty_like(self._on_host, device=device, pin_memory=False)

    def copy_to_device(self) -> None:
        """Start its copy to the memory that was allocated, on the current stream."""
        assert self.on_device is not None
        assert self._on_host is not None
        self.on_device.copy_(self._on_host, non_blocking=True)

    def read(self) -> Tensor:
        """Return it on the device; raises UnsupportedError if it was changed in place since it was saved."""
        assert self.on_device is not None, "a block's saved tensors are on the device in its backward"
        if self._version is not None:
            _require_unchanged(self.on_device, self._version)
        return self.on_device

    def free(self) -> None:
        """Free it on the device; raises UnsupportedError if it was changed in place since it was saved."""
        if self.on_device is not None:
            self.read()
        self.on_device = self._version = None


def _require_unchanged(tensor: Tensor, version: int) -> None:
    """Raise UnsupportedError unless `tensor` is as it was saved: autograd itself does not look behind hooks."""
    if tensor._version != version:
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} that a block saved for backward was changed in place afterwards, "
            "which its gradients would not know: write to a new tensor in the model"
        )


class BlockActivations:
    """The saved tensors of one forward of a block."""

    _running: BlockActivations | None = None

    def __init__(
        self,
        previous: BlockActivations | None,
        ignored: set[int],
        reach: Callable[[BlockActivations], None],
        *,
        stays: bool,
    ) -> None:
        """Begin those of the block after `previous`; `reach` is called before backward reads any of them.

        Storages with an `ignored` identity are not moved, and none is if it `stays`.
        """
        self.previous, self._ignored, self._reach, self._stays = previous, ignored, reach, stays
        self._saved: dict[int, SavedStorage] = {}
        self._owned_by_handles: WeakSet[SavedStorage] = WeakSet()
        self.event: Any = None
        """Of the newest copy, to the host or back; None before it, and on a host."""
        self.coming: list[SavedStorage] = []
        """Storages on their way to the device."""
        self._following: weakref[BlockActivations] | None = None
        self._was_read = False
        if previous is not None:
            previous._following = weakref(self)

    def read_next(self) -> BlockActivations | None:
        """Return those that backward reads after these, now that it reads these; None for none.

        A backward to inputs goes from the last block to the first, torch's backward to weights that follows it from the
        first to the last.
        """
        following = None if self._following is None else self._following()
        found = following if self._was_read else self.previous
        self._was_read = True
        return found

    @classmethod
    def of_running_block(cls) -> BlockActivations | None:
        """Return those of the block whose forward runs, None outside of such a block."""
        return cls._running

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save what autograd saves within the context."""
        BlockActivations._running = self
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            BlockActivations._running = None

    @property
    def storages(self) -> list[SavedStorage]:
        """Return the storages that are moved and still needed."""
        return [*self._saved.values(), *self._owned_by_handles]

    def pack(self, tensor: Tensor) -> Handle | Here:
        """Return what autograd is to keep in place of `tensor`."""
        if self._stays or wraps_tensors(type(tensor)) or tensor.layout is not torch.strided:
            return Here(self, tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage_identity(tensor) in self._ignored:
            return Here(self, tensor.detach(), tensor._version)
        saved = self._saved.setdefault(storage_identity(tensor), SavedStorage(tensor.detach()))
        return Handle(self, saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def unpack(kept: Handle | Here) -> Tensor:
        """Return the tensor that `pack` was given."""
        return kept.get()

    def reach(self) -> None:
        """Have them on the device, from where the current stream continues."""
        self._reach(self)

    def leave_to_handles(self) -> None:
        """Keep storages alive no longer than their handles, once they have been copied to the host."""
        self._owned_by_handles = WeakSet(self._saved.values())
        self._saved.clear()
        self._ignored.clear()

    def free(self) -> None:
        """Free on the device what is on the host."""
        self.coming = []
        for storage in self.storages:
            storage.free()


class Here(NamedTuple):
    """A saved tensor that stays on the device."""

    saved: BlockActivations
    tensor: Tensor
    version: int
    """Of the tensor when it was saved."""

    def get(self) -> Tensor:
        """Return the tensor; raises UnsupportedError if it was changed in place since it was saved."""
        self.saved.reach()
        _require_unchanged(self.tensor, self.version)
        return self.tensor


class Handle(NamedTuple):
    """A saved tensor whose storage is moved."""

    saved: BlockActivations
    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        """Return the tensor, on the device."""
        self.saved.reach()
        return self.storage.read().view(self.dtype).as_strided(self.size, self.stride, self.offset)
