"""Fused optimizers on DTensors, without asking for every parameter how the result is sharded.

A fused update reads a parameter's own shard, gradient and moments, and writes them in place. Where those of each
parameter are placed alike nothing moves between ranks, and torch calls the kernel on the local tensors. It finds that
out in Python: for the 720 parameters of 80 blocks that took 9 of a trace's 60 CPU-seconds (torch 2.13, 2026-11-23).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.tracer.torch_patches.torch_names import replace

_FUSED = (torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_adam_.default)
_NUM_LISTS = 4
"""Parameters, gradients and two moments, which come first; then what may be left out, and a step count for each."""


def update_shards_in_place() -> None:
    """Run fused optimizers on local tensors wherever those of a parameter are placed alike, for good."""
    replace(DTensor._op_dispatcher, "_custom_op_handlers", lambda handlers: handlers | dict.fromkeys(_FUSED, _update))


def _update(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _are_placed_alike(args[:_NUM_LISTS]):
        handlers = DTensor._op_dispatcher._custom_op_handlers
        own = handlers.pop(func)
        try:
            return func(*args, **kwargs)
        finally:
            handlers[func] = own
    local_args, local_kwargs = tree_map_only(DTensor, lambda one: one._local_tensor, (args, kwargs))
    return func(*local_args, **local_kwargs)


def _are_placed_alike(lists: tuple[list[Tensor], ...]) -> bool:
    """Return whether the tensors at each position of `lists` are placed alike."""
    return all(len({_placement(tensor) for tensor in tensors}) == 1 for tensors in zip(*lists, strict=True))


def _placement(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
