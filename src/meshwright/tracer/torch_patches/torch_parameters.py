"""Parameters under fake tensors: in-place moves between devices, fused optimizers on DTensors; checked in torch 2.13.

On CUDA Module.to() and FSDP2 replace a parameter's data, so that tied modules and optimizers keep the same parameter.
The device of a fake tensor is fixed: torch swaps the tensor with another one, and refuses while weak references to it
exist. Fake mode keeps such references without using them again, so the swap is made here without that check.

A fused update reads a parameter's local shard, gradient and moments, and writes them in place. With equal placements
nothing moves between ranks, and torch calls the kernel on local tensors. It checks that in Python: for the 720
parameters of 80 blocks this took 9 of a trace's 60 CPU-seconds (torch 2.13, 2026-11-23), and is skipped here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.tracer.torch_patches.torch_names import replace


def move_states_in_place(device_type: str) -> None:
    """Make Module.to() move fake parameters, and fully_shard() those on the host, from now on."""
    replace(torch.utils, "swap_tensors", _swapping_fakes)
    replace(_fsdp_init, "_get_managed_states", functools.partial(_moving, device_type))


def _swapping_fakes(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    @functools.wraps(swap)
    def swapped(one: Tensor, other: Tensor) -> None:
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):
            _become(one, other)
        else:
            swap(one, other)

    return swapped


def _become(tensor: Tensor, other: Tensor) -> None:
    """Give a fake tensor another's data; it keeps attributes that a program set."""
    torch._C._swap_tensor_impl(tensor, other)
    vars(tensor).update(vars(other))


def _moving(device_type: str, find: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(find)
    def found(modules: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for module in modules:
            for states in (module._parameters, module._buffers):
                for name, tensor in states.items():
                    if tensor is not None and tensor.device.type not in (device_type, "meta"):
                        states[name] = _moved(tensor, device_type)  # type: ignore[assignment]
        return find(modules, *args, **kwargs)

    return found


def _moved(tensor: Tensor, device_type: str) -> Tensor:
    """Return the tensor on the device: the same object, so that modules still share it, unless it is a real one."""
    moved = tensor.detach().to(torch.device(device_type))
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):
        return moved
    _become(tensor, moved)
    return tensor


_FUSED = (torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_adam_.default)
_NUM_LISTS = 4
"""Parameters, gradients and two moments; optional arguments and step counts follow."""


def update_shards_in_place() -> None:
    """Run fused optimizers on local tensors where those of each parameter have equal placements, permanently."""
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
    """Return whether the tensors at each position of `lists` have equal placements."""
    return all(len({_placement(tensor) for tensor in tensors}) == 1 for tensors in zip(*lists, strict=True))


def _placement(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
