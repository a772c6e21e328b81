"""MemoryPools: the pools that [memory] names, for one device; none on a CPU, whose only memory is the host's."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.errors import UnsupportedError
from meshwright.memory.capabilities import Capability, managed_memory, nccl_allocator
from meshwright.memory.managed_pool import ManagedPool
from meshwright.spec.job.memory_section import CommunicationPool, MemorySection
from meshwright.units import format_bytes


@dataclass(frozen=True)
class MemoryPools:
    """Pools by use; None, or "device", where the caching allocator serves it as always."""

    section: MemorySection
    device: torch.device
    embedding: ManagedPool | None = None
    optimizer_state: ManagedPool | None = None
    communication: CommunicationPool = "device"

    def notes(self) -> Iterator[str]:
        """Yield one sentence for each key that is set, for the log."""
        for key, value in self.section.to_dict().items():
            if value == "device":
                continue
            if self.device.type == "cpu":
                yield f'memory.{key} = "{value}" has no effect on a CPU, which has one memory'
            elif key == "communication":
                yield f'memory.{key} = "{value}": {_communication(value, self.device).why}'
            else:
                pool = getattr(self, key)
                yield f'memory.{key} = "{value}": {format_bytes(pool.num_bytes)} of managed memory of the host'


def memory_pools(section: MemorySection, device: torch.device) -> MemoryPools:
    """Return the pools of `section` for `device`; raises UnsupportedError where the device lacks one."""
    if device.type == "cpu":
        return MemoryPools(section, device)
    is_real = device.type == "cuda"
    if is_real and section.uses_managed_memory:
        key = next(key for key in ("embedding", "optimizer_state") if getattr(section, key) == "uvm")
        _require(f'memory.{key} = "uvm"', managed_memory(device), f'memory.{key} to "device"')
    if is_real and section.communication == "nccl":
        _require('memory.communication = "nccl"', nccl_allocator(device), 'memory.communication to "device"')
    return MemoryPools(
        section,
        device,
        embedding=ManagedPool(device) if section.embedding == "uvm" else None,
        optimizer_state=ManagedPool(device) if section.optimizer_state == "uvm" else None,
        communication=section.communication if is_real else "device",
    )


def _communication(pool: str, device: torch.device) -> Capability:
    if pool == "nccl":
        return nccl_allocator(device)
    return Capability("symmetric memory", True, "FSDP2 takes its buffers from NCCL's symmetric memory")


def _require(asked: str, capability: Capability, remedy: str) -> None:
    if not capability.is_available:
        raise UnsupportedError(f"{asked}: {capability.name} is not available: {capability.why}: set {remedy}")
