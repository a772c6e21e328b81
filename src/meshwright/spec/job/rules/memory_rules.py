"""What the keys of [memory] do not go with, checked before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.sections import OptimizerSection
from meshwright.spec.layout.device_rules import made_by, symmetric_memory_obstacle
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.device import Device
from meshwright.spec.problem import Problem

_NVIDIA = "nvidia"
_WITH_MULTICAST = ("hopper", "blackwell", "blackwell-ultra")
"""Architectures whose switch NCCL's allocator registers buffers with; torch takes none from it on others."""
_STATE, _COMMUNICATION = "memory.optimizer_state", "memory.communication"


def memory_problems(memory: MemorySection, optimizer: OptimizerSection, layout: Layout) -> list[Problem]:
    """Return why the pools of `memory` cannot be used with `layout` and `optimizer`."""
    of_optimizer = _state_problems(memory, optimizer)
    return [*of_optimizer, *_offload_problems(memory, layout), *_communication_problems(memory, layout)]


def pool_device_problems(memory: MemorySection, device: Device) -> Iterator[Problem]:
    """Yield which pools the catalogue's `device` lacks; without a memory of its own, every key is without effect."""
    if not device.has_own_memory:
        return
    for key, value in memory.changed.items():
        obstacle = symmetric_memory_obstacle(device) if value == "symmetric" else ""
        if device.vendor != _NVIDIA:
            obstacle = f"needs an NVIDIA GPU, and {device.name} is {made_by(device)}"
        elif value == "nccl" and device.architecture not in _WITH_MULTICAST:
            obstacle = f"needs a GPU with multicast (Hopper or newer), and {device.name} is {made_by(device)}"
        if obstacle:
            yield Problem(f'memory.{key} = "{value}" {obstacle}', [{f"memory.{key}": "device"}])


def idle_group_keys(memory: MemorySection, layout: Layout) -> Iterator[str]:
    """Yield the keys about FSDP2's communication that are set where no ranks share parameters."""
    if layout.fsdp * layout.dp_replicate > 1:
        return
    if memory.communication != "device":
        yield f'{_COMMUNICATION} = "{memory.communication}"'
    if layout.separate_reduce_group:
        yield "layout.separate_reduce_group = true"


def _offload_problems(memory: MemorySection, layout: Layout) -> Iterator[Problem]:
    if not layout.cpu_offload:
        return
    for name in ("embedding", "optimizer_state"):
        if getattr(memory, name) == "uvm":
            yield Problem(
                f'memory.{name} = "uvm" has nothing to move with layout.cpu_offload = true, which keeps parameters and '
                "optimizer state in the host's memory",
                [{f"memory.{name}": "device"}, {"layout.cpu_offload": False}],
            )


def _state_problems(memory: MemorySection, optimizer: OptimizerSection) -> Iterator[Problem]:
    if memory.optimizer_state != "uvm":
        return
    if optimizer.state_dtype == "int8":
        yield Problem(
            f'{_STATE} = "uvm" is not built for optimizer.state_dtype = "int8", whose states are torchao\'s tensors',
            [{_STATE: "device"}, {"optimizer.state_dtype": "bfloat16"}, {"optimizer.state_dtype": "float32"}],
        )
    if optimizer.in_backward:
        yield Problem(
            f'{_STATE} = "uvm" would make each reduction of gradients wait for the link to the host, over which '
            "optimizer.in_backward = true reads and writes states",
            [{_STATE: "device"}, {"optimizer.in_backward": False}],
        )


def _communication_problems(memory: MemorySection, layout: Layout) -> Iterator[Problem]:
    if memory.communication != "device" and layout.separate_reduce_group:
        yield Problem(
            f'{_COMMUNICATION} = "{memory.communication}" takes memory from the group of all-gathers, and '
            "layout.separate_reduce_group = true reduces in another (torch allows one of the two)",
            [{_COMMUNICATION: "device"}, {"layout.separate_reduce_group": False}],
        )
    if memory.communication != "device" and layout.cuda_graphs:
        yield Problem(
            f'{_COMMUNICATION} = "{memory.communication}" is an allocator of FSDP2\'s buffers, which '
            "layout.cuda_graphs = true does not use",
            [{_COMMUNICATION: "device"}, {"layout.cuda_graphs": False}],
        )
    if memory.communication != "device" and layout.compile == "model":
        yield Problem(
            f'{_COMMUNICATION} = "{memory.communication}" is an allocator of FSDP2\'s buffers, and layout.compile = '
            '"model" communicates in its own graph without FSDP2',
            [{_COMMUNICATION: "device"}, {"layout.compile": True}],
        )
