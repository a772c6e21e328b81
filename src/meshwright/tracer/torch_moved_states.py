"""FSDP2 moves what a model's author built on the host to the device; a fake tensor cannot change its device in place.

On a real device torch gives each parameter other data. Here the module gets another parameter, on the device, before
FSDP2 looks for those that it shards. Checked in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init

from meshwright.tracer.torch_names import replace


def move_states_first(device_type: str) -> None:
    """Have fully_shard find all parameters and buffers on the device, from now on."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        """Return the tensor on the device: one for all modules that share it."""
        if tensor.device.type in (device_type, "meta"):
            return tensor
        _, found = moved.setdefault(id(tensor), (tensor, _moved(tensor, device_type)))
        return found

    def moving(find: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(find)
        def found(modules: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            for module in modules:
                for states in (module._parameters, module._buffers):
                    states.update({name: once(one) for name, one in states.items() if one is not None})  # type: ignore[misc]
            return find(modules, *args, **kwargs)

        return found

    replace(_fsdp_init, "_get_managed_states", moving)


def _moved(tensor: Tensor, device_type: str) -> Tensor:
    copy = tensor.detach().to(torch.device(device_type))
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
