"""StorageNumbers: the storages that exist, by the numbers under which the recorder has them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from meshwright.spec.trace.trace import NONE
from meshwright.tracer.record.trace_recorder import TraceRecorder


class StorageNumbers:
    """Numbers of live storages, and the collective that wrote each last."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._storages: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """By address the number, the size and the storage."""
        self._works: dict[int, int] = {}

    def follow(self, storage: torch.UntypedStorage, *, by_newest: bool = True) -> int:
        """Return a storage's number: a new one if it is new, or was resized since it was last seen.

        New memory is allocated by the newest record, unless the program resized it (`by_newest` is False).
        """
        known = self.number_of(storage)
        if known is not None:
            return known
        self._free(storage._cdata)
        number = self._recorder.allocate(storage.nbytes(), by_newest=by_newest)
        self._add(storage, number)
        return number

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a known storage of unchanged size; None for others."""
        known = self._storages.get(storage._cdata)
        return known[0] if known is not None and known[1] == storage.nbytes() else None

    def adopt(self, tensor: Tensor, number: int, work: int) -> None:
        """Register a tensor's new storage as number `number`, last written by the collective `work` if not -1."""
        self._add(tensor.untyped_storage(), number)
        if work != NONE:
            self.set_work(tensor, work)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a storage that was resized, as FSDP does to free unsharded parameters."""
        if storage._cdata in self._storages:
            self.follow(storage, by_newest=False)

    def set_work(self, tensor: Tensor, work: int) -> None:
        """Register the collective that writes a tensor's storage."""
        self._works[tensor.untyped_storage()._cdata] = work

    def work_of(self, tensor: Tensor) -> int:
        """Return the collective that wrote a tensor's storage last; -1 for none."""
        return self._works.get(tensor.untyped_storage()._cdata, NONE)

    def _add(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata
        alive = weakref.ref(storage, lambda _: self._free(key, number))
        self._storages[key] = (number, storage.nbytes(), alive)

    def _free(self, key: int, number: int | None = None) -> None:
        """Free the storage at an address, unless it is another one than `number`."""
        known = self._storages.get(key)
        if known is not None and number in (None, known[0]):
            del self._storages[key]
            self._works.pop(key, None)
            self._recorder.free(known[0])
