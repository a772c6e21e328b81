"""MemoryPools: the pools that [memory] names, for one device; none on a CPU, whose only memory is the host's."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.errors import UnsupportedError
from meshwright.memory.capabilities import Capability, managed_memory, nccl_allocator, symmetric_memory
from meshwright.memory.managed_pool import ManagedPool
from meshwright.spec.job.memory_section import CommunicationPool, MemorySection
from meshwright.units import format_bytes

_DEVICE = "device"
"""The value of each key that leaves its use to the caching allocator."""


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
            asked = f'memory.{key} = "{value}"'
            if value == _DEVICE:
                continue
            if self.device.type == "cpu":
                yield f"{asked} has no effect on a CPU, which has one memory"
            elif key == "communication":
                yield f"{asked}: {_communication(self.section, self.device).why}"
            else:
                pool: ManagedPool = getattr(self, key)
                yield f"{asked}: {format_bytes(pool.num_bytes)} in managed memory of the host"


def memory_pools(section: MemorySection, device: torch.device) -> MemoryPools:
    """Return the pools of `section` for `device`; raises UnsupportedError where the device lacks one."""
    if device.type == "cpu":
        return MemoryPools(section, device)
    is_real = device.type == "cuda"
    for key in ("embedding", "optimizer_state") if is_real else ():
        if getattr(section, key) == "uvm":
            _require(section, key, managed_memory(device.index or 0, is_rocm=_is_rocm()))
    if is_real and section.communication != _DEVICE:
        _require(section, "communication", _communication(section, device))
    return MemoryPools(
        section,
        device,
        embedding=ManagedPool(device) if section.embedding == "uvm" else None,
        optimizer_state=ManagedPool(device) if section.optimizer_state == "uvm" else None,
        # What allocates them changes no trace.
        communication=section.communication if is_real else "device",
    )


def _communication(section: MemorySection, device: torch.device) -> Capability:
    is_rocm, has_nccl = _is_rocm(), torch.distributed.is_nccl_available()
    if section.communication == "symmetric":
        return symmetric_memory(is_rocm=is_rocm, has_nccl=has_nccl)
    return nccl_allocator(device.index or 0, is_rocm=is_rocm, has_nccl=has_nccl)


def _is_rocm() -> bool:
    return torch.version.hip is not None


def _require(section: MemorySection, key: str, capability: Capability) -> None:
    if not capability.is_available:
        raise UnsupportedError(
            f'memory.{key} = "{getattr(section, key)}": {capability.name} is not available: {capability.why}: '
            f'set memory.{key} to "{_DEVICE}"'
        )
