"""MemorySection: the table [memory] of a job: which memory named uses take."""

from typing import Literal

from meshwright.spec.frozen import Frozen

StatePool = Literal["device", "uvm"]
"""device: the caching allocator's memory; uvm: CUDA managed memory that stays in the host's memory."""
CommunicationPool = Literal["device", "nccl", "symmetric"]
"""device: the caching allocator's memory; nccl: NCCL's allocator, registered; symmetric: torch's symmetric memory."""


class MemorySection(Frozen):
    """Which memory named uses take: changes time and memory, never the result. No effect on a CPU."""

    embedding: StatePool = "device"
    """Where embeddings' parameters are: the device, or managed memory in the host's (uvm), read over the link."""
    optimizer_state: StatePool = "device"
    """Where optimizer states are: the device, or managed memory in the host's (uvm), read and written over the link."""
    communication: CommunicationPool = "device"
    """Allocator of FSDP2's communication buffers: the device's, NCCL's with registration, or symmetric memory."""

    @property
    def changed(self) -> dict[str, str]:
        """Return the keys whose use is not left to the caching allocator, with their pools."""
        return {key: value for key, value in self.to_dict().items() if value != "device"}

    @property
    def uses_managed_memory(self) -> bool:
        """Return whether anything is in managed memory."""
        return "uvm" in (self.embedding, self.optimizer_state)
