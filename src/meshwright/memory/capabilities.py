"""What a CUDA device can do about memory pools, each with the sentence that says so; needs no torch.

`is_rocm` says that torch is built for AMD's devices, which nothing here was tried on.
"""

from dataclasses import dataclass

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


def managed_memory(index: int, *, is_rocm: bool) -> Capability:
    """Return whether device `index` uses managed memory in place, without moving its pages (memory.* = "uvm")."""
    if is_rocm:
        return Capability("managed memory", False, "it is asked of NVIDIA's driver, and this build of torch is ROCm's")
    if device_attribute(index, CONCURRENT_MANAGED_ACCESS):
        return Capability("managed memory", True, "the device reads and writes it in the host's memory, over the link")
    return Capability(
        "managed memory",
        False,
        "the device has no concurrent managed access (cudaDevAttrConcurrentManagedAccess is 0, as on Windows, WSL and "
        "GPUs before Pascal), so that its pages would have to move to the device",
    )


def nccl_allocator(index: int, *, is_rocm: bool, has_nccl: bool) -> Capability:
    """Return whether NCCL allocates communication buffers on device `index` (memory.communication = "nccl").

    Without multicast torch's process group allocates none (ProcessGroupNCCL::supportsTensorAlloc, PyTorch 2.13).
    """
    name = "NCCL's allocator"
    if (missing := _without_nccl(name, is_rocm=is_rocm, has_nccl=has_nccl)) is not None:
        return missing
    if device_attribute(index, MULTICAST):
        why = "buffers are registered, and NVLink SHARP (NVLS) uses the device's multicast where a switch has it"
        return Capability(name, True, why)
    why = "the device has no multicast, which NVLink SHARP (NVLS) needs and without which torch does not use it"
    return Capability(name, False, why)


def symmetric_memory(*, is_rocm: bool, has_nccl: bool) -> Capability:
    """Return whether FSDP2 may take buffers from NCCL's symmetric memory (memory.communication = "symmetric")."""
    name = "symmetric memory"
    missing = _without_nccl(name, is_rocm=is_rocm, has_nccl=has_nccl)
    return missing or Capability(name, True, "FSDP2 takes its buffers from NCCL's symmetric memory")


def _without_nccl(name: str, *, is_rocm: bool, has_nccl: bool) -> Capability | None:
    if not has_nccl:
        return Capability(name, False, "this build of torch has no NCCL")
    return (
        Capability(name, False, "this build of torch has AMD's RCCL, with which it was not tried") if is_rocm else None
    )


def extended_gpu_memory(index: int, *, is_rocm: bool) -> Capability:
    """Return whether device `index` addresses the host's memory as its own; no key of a job uses it."""
    if not is_rocm and device_attribute(index, COHERENT_HOST_MEMORY):
        return Capability("extended memory", True, "the device uses the host's page tables, as in GH200 and GB200")
    return Capability("extended memory", False, "the device has page tables of its own, unlike GH200 and GB200")
