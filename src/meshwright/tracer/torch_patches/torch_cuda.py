"""Programs for "cuda" on the simulated accelerator: functions of torch.cuda, and device arguments.

A torch without CUDA defines the names of torch.cuda, most of which raise. Devices that a program names are replaced by
the simulated one on use: `tensor.device.type` is never "cuda", but `tensor.is_cuda` is True.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.amp import autocast_mode
from torch.cuda import nvtx
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device

from meshwright.tracer.record.simulated_device import NAME, device
from meshwright.tracer.torch_patches.torch_names import replace

_NOT_PUBLIC = ("_is_in_bad_fork",)


def redirect_cuda() -> None:
    """Redirect torch.cuda's functions, and those with a device argument, to the simulated accelerator, permanently."""
    # torch caches which functions use the device of `with device:`: the originals, not their replacements.
    _device._device_constructors()
    for name in (*(one for one in dir(device) if not one.startswith("_")), *_NOT_PUBLIC):
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, getattr(device, name))
    replace(torch.cuda, "_lazy_init", lambda _: _nothing)
    replace(nvtx, "_nvtx", lambda _: _Marks())
    replace(torch._utils, "_get_available_device_type", lambda _: lambda: NAME)
    replace(torch, "tensor", _on_simulated)
    replace(torch, "as_tensor", _on_simulated)
    replace(torch, "asarray", _on_simulated)
    replace(torch, "set_default_device", _on_simulated)
    replace(Tensor, "to", _to)
    replace(Tensor, "cuda", _cuda)
    replace(Tensor, "pin_memory", lambda _: _itself)
    replace(Tensor, "is_cuda", lambda _: property(lambda tensor: tensor.device.type == NAME))
    replace(autocast_mode.autocast, "__init__", _on_simulated)
    replace(DeviceMesh, "__init__", _on_simulated)
    replace(device_mesh, "init_device_mesh", _on_simulated)
    replace(distributed, "init_device_mesh", lambda _: device_mesh.init_device_mesh)


def simulated(value: Any) -> Any:
    """Return `value`, or the simulated accelerator if it names CUDA or another index: a process has one."""
    if isinstance(value, torch.device):
        return _THE_ONE if value.type == "cuda" or (value.type == NAME and value.index) else value
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", NAME):
        return NAME
    return value


_THE_ONE = torch.device("privateuseone", 0)
"""The simulated accelerator, by torch's default name."""


def _on_simulated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*map(simulated, args), **{name: simulated(value) for name, value in kwargs.items()})

    return called


def _to(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(move)
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and type(args[0]) is int:
            args = (_THE_ONE, *args[1:])
        return move(tensor, *map(simulated, args), **{name: simulated(value) for name, value in kwargs.items()})

    return to


def _cuda(_: Any) -> Callable[..., Tensor]:
    def cuda(tensor: Tensor, _: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return tensor.to(NAME, non_blocking=non_blocking, **kwargs)

    return cuda


def _itself(tensor: Tensor, *_: Any) -> Tensor:
    """Replace pin_memory(), which is not simulated."""
    return tensor


class _Marks:
    """torch.cuda.nvtx without its library."""

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_: 0


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a function that a simulated accelerator does not need."""
