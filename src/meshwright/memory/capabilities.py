"""What a device can do about memory pools, each with the sentence that says so."""

from dataclasses import dataclass

import torch

from meshwright.memory.cuda_driver import (
    COHERENT_HOST_MEMORY,
    CONCURRENT_MANAGED_ACCESS,
    MULTICAST,
    device_attribute,
)


@dataclass(frozen=True)
class Capability:
    """Whether a device has something, and why."""

    name: str
    is_available: bool
    why: str
    """One sentence without its full stop."""


def managed_memory(device: torch.device) -> Capability:
    """Return whether a CUDA device uses managed memory in place, without moving its pages (memory.* = "uvm")."""
    if torch.version.hip:
        return Capability("managed memory", False, "it is asked of NVIDIA's driver, and this build of torch is ROCm's")
    if device_attribute(device.index or 0, CONCURRENT_MANAGED_ACCESS):
        return Capability("managed memory", True, "the device reads and writes it in the host's memory, over the link")
    return Capability(
        "managed memory",
        False,
        "the device has no concurrent managed access (cudaDevAttrConcurrentManagedAccess is 0, as on Windows, WSL and "
        "GPUs before Pascal), so that its pages would have to move to the device",
    )


def nccl_allocator(device: torch.device) -> Capability:
    """Return whether torch's NCCL allocates communication buffers (memory.communication = "nccl")."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return Capability("NCCL's allocator", False, "this build of torch has no NCCL")
    if torch.version.hip:
        return Capability("NCCL's allocator", False, "this build of torch has AMD's RCCL, whose allocator was not tried")
    if device_attribute(device.index or 0, MULTICAST):
        why = "buffers are registered, and the device has multicast, which NVLink SHARP (NVLS) uses where a switch has it"
    else:
        why = "buffers are registered; the device has no multicast, so that NVLink SHARP (NVLS) is not used"
    return Capability("NCCL's allocator", True, why)


def symmetric_memory(unit: type) -> Capability:
    """Return whether FSDP2's `unit` class takes symmetric memory (memory.communication = "symmetric")."""
    name = "symmetric memory"
    if not hasattr(unit, "set_symm_mem_for_comm"):
        why = f"FSDP2 of torch {torch.__version__} has no set_symm_mem_for_comm, which torch 2.12 or 2.13 has"
        return Capability(name, False, why)
    if torch.version.hip:
        return Capability(name, False, "its backend is NCCL's, and this build of torch is ROCm's")
    return Capability(name, True, "FSDP2 takes its buffers from NCCL's symmetric memory")


def extended_gpu_memory(device: torch.device) -> Capability:
    """Return whether the device addresses the host's memory as its own; nothing of a job uses it."""
    if not torch.version.hip and device_attribute(device.index or 0, COHERENT_HOST_MEMORY):
        return Capability("extended GPU memory", True, "the device uses the host's page tables, as in GH200 and GB200")
    return Capability("extended GPU memory", False, "the device has its own page tables, unlike GH200 and GB200")
