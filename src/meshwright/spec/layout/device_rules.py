"""What a layout asks of a device that only some makers' devices, or some of their cards, have.

cuDNN is NVIDIA's library, and varlen_attn's kernels have run on no other maker's device with this trainer. Its and
flash attention's kernels are for NVIDIA's Ampere and newer, and so is cuDNN's attention (torch 2.13, aten's
transformers/cuda/sdp_utils.cpp: compute capability 8.0). async_tp reads and writes other ranks' memory (torch's CUDA
symmetric memory), which needs peer access between GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.layout.attention_backend import AttentionBackend
from meshwright.spec.layout.communication_sms import communication_sms_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.device import Device
from meshwright.spec.problem import Problem

_NVIDIA = "nvidia"
_NVIDIA_BACKENDS: tuple[AttentionBackend, ...] = ("cudnn", "varlen")
_AMPERE_BACKENDS: tuple[AttentionBackend, ...] = ("flash", "cudnn", "varlen")
_BEFORE_AMPERE = ("pascal", "volta", "turing")
"""NVIDIA's families of compute capability 6.0 to 7.5; what a family that is unknown has is not known either."""
_BACKEND_KEY = "layout.attention_backend"


def layout_device_problems(layout: Layout, device: Device) -> Iterator[Problem]:
    """Yield what `layout` asks of the catalogue's `device` that it lacks."""
    if (missing := kernel_problem(layout.attention_backend, device)) is not None:
        yield missing
    if layout.async_tp and (why := symmetric_memory_obstacle(device)):
        yield Problem(f"layout.async_tp = true {why}", [{"layout.async_tp": False}])
    yield from communication_sms_problems(layout, device)


def kernel_problem(backend: AttentionBackend, device: Device) -> Problem | None:
    """Return why `device`, by its maker or its family, has no kernel of `backend`; None for a host and where it has."""
    if device.torch_type == "cpu":
        return None
    if device.vendor != _NVIDIA and backend in _NVIDIA_BACKENDS:
        needed, other = "an NVIDIA GPU", "flash"
    elif device.vendor == _NVIDIA and device.architecture in _BEFORE_AMPERE and backend in _AMPERE_BACKENDS:
        needed, other = "an NVIDIA GPU of Ampere or newer (compute capability 8.0)", "efficient"
    else:
        return None
    what = f'{_BACKEND_KEY} = "{backend}" needs {needed}, and {device.name} is {made_by(device)}'
    return Problem(what, [{_BACKEND_KEY: other}, {_BACKEND_KEY: "auto"}])


def symmetric_memory_obstacle(device: Device) -> str:
    """Return why `device` has no symmetric memory, as the rest of a sentence; "" for a host, and where it has."""
    if device.torch_type == "cpu":
        return ""
    if device.vendor != _NVIDIA:
        return f"needs an NVIDIA GPU, and {device.name} is {made_by(device)}"
    if not device.has_peer_access:
        return f"needs GPUs that access each other's memory, and {device.name} has no peer access"
    return ""


def made_by(device: Device) -> str:
    """Return whose and which device it is, as a part of a sentence."""
    return f"{device.vendor}'s {device.architecture or device.title}"
