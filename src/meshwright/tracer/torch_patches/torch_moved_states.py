"""Parameters change their device or dtype in place, as by Module.to() and by FSDP2; checked in torch 2.13.

On CUDA torch replaces a parameter's data, so that tied modules and optimizers keep the same parameter. The device of a
fake tensor is fixed: torch swaps the tensor with another one, and refuses to while weak references to it exist. Fake
mode itself keeps such references, which it does not use again, so the swap is made here without that check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init

from meshwright.tracer.torch_patches.torch_names import replace


def move_states_in_place(device_type: str) -> None:
    """Have Module.to() and the like move fake parameters, and fully_shard those that are on the host, from now on."""
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
    """Give a fake tensor another's data; attributes that a program set on it stay."""
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
    """Return the tensor on the device: itself, so that modules that share it still do, unless it is a real one."""
    moved = tensor.detach().to(torch.device(device_type))
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):
        return moved
    _become(tensor, moved)
    return tensor
