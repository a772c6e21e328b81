"""Estimate: what a step is predicted to take, with its parts and how sure we are."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.label import label_of
from meshwright.spec.step.step_decomposition import StepDecomposition


class MemoryUse(Frozen):
    """One rank's peak device memory by tensor class, in bytes."""

    parameters_bytes: NonNegativeInt = 0
    """This rank's part of the parameters, in the format they are kept in."""
    gradients_bytes: NonNegativeInt = 0
    """This rank's part of the gradients."""
    optimizer_state_bytes: NonNegativeInt = 0
    """Float32 master weights and moments."""
    unsharded_parameters_bytes: NonNegativeInt = 0
    """All-gathered parameters of the blocks in use, and their unreduced gradients (FSDP)."""
    activations_bytes: NonNegativeInt = 0
    """Activations saved for backward of all microbatches in flight."""
    logits_bytes: NonNegativeInt = 0
    """Logits, their gradient, and temporaries of the loss."""
    communication_buffers_bytes: NonNegativeInt = 0
    """Staging buffers of collectives."""
    workspace_bytes: NonNegativeInt = 0
    """Temporary tensors of the op at the peak, and libraries' workspaces."""
    fragmentation_bytes: NonNegativeInt = 0
    """Reserved by the caching allocator and not allocated."""
    context_bytes: NonNegativeInt = 0
    """Taken outside the allocator: driver context, loaded kernels, NCCL."""

    @property
    def allocated_bytes(self) -> int:
        """Return the peak of allocated bytes (torch.cuda.max_memory_allocated)."""
        return self.reserved_bytes - self.fragmentation_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the peak of reserved bytes (torch.cuda.max_memory_reserved)."""
        return self.device_bytes - self.context_bytes

    @property
    def device_bytes(self) -> int:
        """Return all bytes that the device must have (what nvidia-smi shows)."""
        return sum(getattr(self, name) for name in type(self).model_fields)


MEMORY_CLASSES = {name: label_of(name) for name in MemoryUse.model_fields}
"""What each class of memory is called in tables and messages: the field name without its unit."""


class Estimate(Frozen):
    """Step time and peak memory of one Layout, with an interval."""

    step: StepDecomposition
    """The step by component, computation by cause, in seconds."""
    memory: MemoryUse
    """Peak memory of the fullest rank by tensor class, in bytes."""
    mfu: float | None = Field(None, ge=0)
    """Model FLOPs of a step (no recompute) over what all devices could do in its time at the dense peak of the matmul
    dtype; None when the peak is unknown."""
    hfu: float | None = Field(None, ge=0)
    """The same with recomputed FLOPs."""
    relative_error: NonNegativeFloat
    """Half width of the 80 % interval as a share of the step time: 0.1 means plus or minus 10 %."""
