"""ManagedPool: moves tensors into managed memory that stays in the host's memory.

Tensors are bump-allocated from blocks of 32 MiB, each with a storage of its own; a block is freed with the last tensor
in it. What is moved lasts as long as the run, so that nothing is reused.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.memory.cuda_driver import ManagedBlock
from meshwright.memory.managed_tensors import mark, marking

_BLOCK_BYTES = 32 << 20
_ALIGNMENT = 512
"""As torch's own allocator has it."""


class Block(Protocol):
    """Memory that is freed with the last reference to it."""

    num_bytes: int

    @property
    def address(self) -> int:
        """Return where it is."""


class _Span:
    """Bytes of a block, as `torch.as_tensor` takes them (the CUDA array interface); the tensor keeps the block."""

    def __init__(self, block: Block, start: int, num_bytes: int) -> None:
        self._block = block
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (block.address + start, False),
            "strides": None,
            "version": 3,
        }


class ManagedPool:
    """Managed memory of one device; of a simulated one only the marks of it."""

    def __init__(self, device: torch.device, allocate: Callable[[int], Block] | None = None) -> None:
        """Take blocks from `allocate`, by default the driver of `device`."""
        self._device, self._allocate = device, allocate or self._block
        self._current: Block | None = None
        self._used = 0
        self.num_bytes = 0
        """Of all tensors that were moved."""

    def move(self, tensor: Tensor) -> Tensor:
        """Return a copy of a plain tensor in the pool; a tensor that wraps others keeps its identity, and its parts
        are replaced.
        """
        whole: Any = tensor
        if is_traceable_wrapper_subclass(whole):
            names, _ = whole.__tensor_flatten__()
            for name in names:
                part = getattr(whole, name)
                if isinstance(part, Tensor):
                    setattr(whole, name, self.move(part))
            return tensor
        moved = self.empty_like(tensor)
        moved.copy_(tensor)
        return moved

    @torch.no_grad()
    def empty_like(self, tensor: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Return contiguous memory of the pool for a tensor of the dtype of `tensor`, and its shape or another."""
        shape = tensor.shape if shape is None else shape
        num_bytes = shape.numel() * tensor.element_size()
        self.num_bytes += num_bytes
        if num_bytes == 0 or self._device.type != "cuda":
            with marking():
                made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            mark(made)
            return made
        span = self._span(num_bytes)
        made = torch.as_tensor(span, device=self._device).view(tensor.dtype).view(shape)
        mark(made)
        return made

    def _span(self, num_bytes: int) -> _Span:
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._current is None or start + num_bytes > self._current.num_bytes:
            self._current, start = self._allocate(max(num_bytes, _BLOCK_BYTES)), 0
        self._used = start + num_bytes
        return _Span(self._current, start, num_bytes)

    def _block(self, num_bytes: int) -> Block:
        return ManagedBlock(num_bytes, self._device.index or 0)
