"""Activations that wait in the host's memory: what blocks save for backward (layout.activation_offload).

    forward   when a block has run, what it saved is copied to the host, next to the forward of the block after it, at
              whose end the device frees it
    backward  when a block's backward starts, what the block before it saved is copied back, next to that backward
    weights   where their gradients are a backward of their own, which torch runs from the first block on, what the
              block after it saved is

So a device holds what two blocks save at most, and what the model's last block saves, whose backward follows at once.
Each direction has a stream of its own, and the host's memory is pinned. Recomputation composes: what a block saves is
then its input, and the outputs that selective recomputation keeps. On a CPU the copies are within its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from meshwright.parallelism.saved_tensors import BlockActivations
from meshwright.parallelism.torch_private.torch_dispatch import plain_tensors, storage_identity, tensors_in


def offload_blocks(blocks: nn.ModuleList, transfers: HostTransfers, *, has_last: bool) -> None:
    """Wrap the blocks of a stage in place so that what they save waits on the host; `has_last` for the last stage."""
    own = [number for number, block in enumerate(blocks) if block is not None]
    for number in own:
        stays = has_last and number == own[-1]
        blocks[number] = OffloadedBlock(blocks[number], transfers, is_first=number == own[0], stays=stays)


class OffloadedBlock(ActivationWrapper):
    """A block whose saved tensors wait on the host until its backward."""

    def __init__(self, block: nn.Module, transfers: HostTransfers, *, is_first: bool, stays: bool) -> None:
        super().__init__(block)  # type: ignore[no-untyped-call]
        self._transfers, self._is_first, self._stays = transfers, is_first, stays

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns for `x`; further tensors, which blocks share, stay on the device."""
        if not torch.is_grad_enabled():
            return self._checkpoint_wrapped_module(x, *args, **kwargs)
        shared = (*self.parameters(), *self.buffers(), *tensors_in((args, kwargs)))
        saved = self._transfers.begin(shared, is_first=self._is_first, stays=self._stays)
        with saved.saving():
            output = self._checkpoint_wrapped_module(x, *args, **kwargs)
        self._transfers.leave(saved)
        return output


class HostTransfers:
    """The copies of a rank's saved tensors between the memories of its device and of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._to_host, self._to_device = self._module.Stream(), self._module.Stream()
        self._newest: BlockActivations | None = None
        self._leaving: BlockActivations | None = None
        self._reached: list[BlockActivations] = []
        """What backward has reached and not freed, the newest last."""
        self.moved_bytes = 0
        """Bytes that were copied to the host so far."""

    def begin(self, shared: Iterable[Tensor], *, is_first: bool, stays: bool) -> BlockActivations:
        """Return what a block's forward will save, `shared` tensors aside; what `stays` is not moved."""
        self._free_reached()
        ignored = {storage_identity(part) for tensor in shared for part in plain_tensors(tensor)}
        self._newest = BlockActivations(None if is_first else self._newest, ignored, self.reach, stays=stays)
        return self._newest

    def leave(self, saved: BlockActivations) -> None:
        """Start to copy what a block saved to the host, and free on the device what the block before it did."""
        self._settle()
        with self._on(self._to_host):
            self.moved_bytes += sum(storage.copy_to_host() for storage in saved.storages)
            saved.event = self._to_host.record_event()
        self._leaving = saved

    def reach(self, saved: BlockActivations) -> None:
        """Have what a block saved on the device, and start to fetch what backward reads next."""
        if self._reached and self._reached[-1] is saved:
            return
        if self._leaving is not saved:
            self._fetch(saved)
        self._settle(but=saved)
        self._module.current_stream().wait_event(saved.event)
        saved.coming = []
        self._free_reached(but=saved)
        self._reached.append(saved)
        if (after := saved.read_next()) is not None:
            self._fetch(after)

    def _fetch(self, saved: BlockActivations) -> None:
        """Start to copy what is on the host only to the device."""
        if not (absent := [storage for storage in saved.storages if storage.on_device is None]):
            return
        for storage in absent:
            # In the pool of the stream that computes, which frees it.
            storage.allocate(self.device)
        with self._on(self._to_device):
            for storage in absent:
                storage.copy_to_device()
            saved.event = self._to_device.record_event()
        saved.coming = absent

    def _settle(self, but: BlockActivations | None = None) -> None:
        """Free on the device what the newest block saved, once its copy to the host is done."""
        if (leaving := self._leaving) is None:
            return
        self._module.current_stream().wait_event(leaving.event)
        if leaving is not but:
            leaving.free()
        leaving.leave_to_handles()
        self._leaving = None

    def _free_reached(self, but: BlockActivations | None = None) -> None:
        """Free on the device what backward has read, of which a part remains where it runs in two parts."""
        for saved in self._reached:
            if saved is not but:
                saved.free()
        self._reached = [saved for saved in self._reached if saved is but]

    def _on(self, stream: Any) -> Any:
        """Return a context on `stream`, which waits for all that the current stream has been given."""
        stream.wait_stream(self._module.current_stream())
        return self._module.stream(stream)
