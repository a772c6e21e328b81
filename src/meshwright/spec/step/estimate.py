"""Estimate: what a step is predicted to take, by component and by class of memory, and how sure we are."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_serializer
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from meshwright.spec.frozen import Frozen
from meshwright.units import format_bytes, label_of


class StepDecomposition(Frozen):
    """A step's seconds by component; `total_s` is their sum.

    Timelines, simulated or measured, report COMPONENTS. The cost model breaks compute_s down further, from the physical
    floor upwards (model_flops_at_peak_s, gemm_inefficiency_s, ...), and adds stragglers_s. JSON holds the components
    that were set.
    """

    model_flops_at_peak_s: NonNegativeFloat = 0.0
    """Model FLOPs over the dense peak of the matmul dtype: no step can take less."""
    gemm_inefficiency_s: NonNegativeFloat = 0.0
    """What large matmuls take because achieved FLOP/s is below the peak."""
    tile_and_wave_quantization_s: NonNegativeFloat = 0.0
    """Tiles and waves that a matmul of this shape fills in part."""
    attention_inefficiency_s: NonNegativeFloat = 0.0
    """What attention takes above the floor."""
    memory_bound_ops_s: NonNegativeFloat = 0.0
    """Norms, activations, casts, losses: ops that are bound by device memory."""
    compute_s: NonNegativeFloat = 0.0
    """Forward and backward on the device, causes not distinguished, with FSDP2's casts, copies within the device's
    memory and sums of gradients."""
    cpu_bound_s: NonNegativeFloat = 0.0
    """CPU-bound: the device waits for kernel launches, Python, the fixed work of a step."""
    recomputation_s: NonNegativeFloat = 0.0
    """Forward that is recomputed in the backward (activation_checkpoint)."""
    repeated_backward_s: NonNegativeFloat = 0.0
    """Backward recomputed because a compiled block cannot split input and weight gradients."""
    tp_communication_s: NonNegativeFloat = 0.0
    """Exposed tensor-parallel collectives, of experts too (etp): not overlapped with computation, here and below."""
    cp_communication_s: NonNegativeFloat = 0.0
    """Exposed context-parallel communication."""
    ep_communication_s: NonNegativeFloat = 0.0
    """Exposed expert-parallel all-to-alls."""
    activation_copies_s: NonNegativeFloat = 0.0
    """Exposed copies of offloaded activations between the memories of the host and the device (activation_offload)."""
    dp_communication_s: NonNegativeFloat = 0.0
    """Exposed data-parallel all-gathers and reductions (FSDP, expert FSDP, dp_replicate), and copies of offloaded
    parameters and gradients between the memories of the host and the device."""
    pipeline_p2p_s: NonNegativeFloat = 0.0
    """Exposed pipeline P2P: messages between stages, in flight while nothing is computed."""
    other_communication_s: NonNegativeFloat = 0.0
    """Exposed collectives of groups without an axis, such as all ranks: norm, loss; other copies between the memories
    of the host and the device."""
    pipeline_bubble_s: NonNegativeFloat = 0.0
    """Pipeline bubble: ranks that wait for a message which has not been sent yet, of the first microbatch, after the
    last, or of a slower stage."""
    optimizer_s: NonNegativeFloat = 0.0
    """Gradient clipping and the optimizer update: on the device, after the last backward; FSDP2's own kernels count as
    compute."""
    data_loading_s: NonNegativeFloat = 0.0
    """The host reads the next samples while the device is idle; the cost model expects none."""
    stragglers_s: NonNegativeFloat = 0.0
    """Stragglers: the slowest of many ranks, which the others wait for in collectives of any axis."""

    @property
    def distinguished(self) -> tuple[str, ...]:
        """Return the components that were set, in the order of COMPONENT_NAMES."""
        return tuple(name for name in COMPONENT_NAMES if name in self.model_fields_set)

    @property
    def total_s(self) -> float:
        """Return the whole step in seconds."""
        return math.fsum(getattr(self, name) for name in type(self).model_fields)

    @property
    def exposed_s(self) -> float:
        """Return the seconds of all communication that no computation hides."""
        return math.fsum(
            (
                self.tp_communication_s,
                self.cp_communication_s,
                self.ep_communication_s,
                self.activation_copies_s,
                self.dp_communication_s,
                self.pipeline_p2p_s,
                self.other_communication_s,
            )
        )

    def summed(self) -> Self:
        """Return the same step in COMPONENTS, the coarser components of a timeline."""
        return type(self)(
            **{name: math.fsum(getattr(self, one) for one in (name, *_CAUSES.get(name, ()))) for name in COMPONENTS}
        )

    def minus(self, other: StepDecomposition) -> dict[str, float]:
        """Return by component the seconds that this step takes more than `other`."""
        names = dict.fromkeys((*self.distinguished, *other.distinguished))
        return {name: getattr(self, name) - getattr(other, name) for name in names}

    @model_serializer(mode="wrap")
    def _distinguished_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, float]:
        values = handler(self)
        return {name: values[name] for name in self.distinguished}


COMPONENT_NAMES = {name: label_of(name) for name in StepDecomposition.model_fields}
"""What each component is called in tables and messages, in their order: the field name without its unit."""

COMPONENTS = (
    "compute_s", "recomputation_s", "tp_communication_s", "cp_communication_s", "ep_communication_s",
    "dp_communication_s", "pipeline_p2p_s", "other_communication_s", "pipeline_bubble_s", "optimizer_s",
    "data_loading_s", "cpu_bound_s",
)  # fmt: skip
"""What a timeline distinguishes, in the order of tables."""
_CAUSES = {
    "compute_s": (
        "model_flops_at_peak_s",
        "gemm_inefficiency_s",
        "tile_and_wave_quantization_s",
        "attention_inefficiency_s",
        "memory_bound_ops_s",
        "repeated_backward_s",
    ),
    "other_communication_s": ("activation_copies_s", "stragglers_s"),
}
"""For each component of a timeline, the finer components that the cost model predicts."""
assert sorted((*COMPONENTS, *(cause for causes in _CAUSES.values() for cause in causes))) == sorted(COMPONENT_NAMES)


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
    """Reserved by the caching allocator and not allocated, next to tensors at their most."""
    cached_bytes: NonNegativeInt = 0
    """Freed blocks, too narrow for what came later, that the allocator keeps as long as the device has room."""
    context_bytes: NonNegativeInt = 0
    """Taken outside the allocator: driver context, loaded kernels, NCCL."""

    @property
    def allocated_bytes(self) -> int:
        """Return the peak of allocated bytes (torch.cuda.max_memory_allocated)."""
        return self.needed_bytes - self.fragmentation_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the allocator must have: it gives back what else it caches where the device is full."""
        return self.device_bytes - self.context_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the peak of reserved bytes (torch.cuda.max_memory_reserved)."""
        return self.needed_bytes + self.cached_bytes

    @property
    def device_bytes(self) -> int:
        """Return all bytes that the device must have; nvidia-smi shows what is cached besides."""
        sizes: list[int] = [getattr(self, name) for name in type(self).model_fields if name != "cached_bytes"]
        return sum(sizes)


def tight_words(needed_bytes: float, usable_bytes: float) -> str:
    """Return what to know of a step that fits although it is predicted to need more than a device has."""
    return (
        f"predicted reserved memory {format_bytes(needed_bytes)}, usable {format_bytes(usable_bytes)}. The step fits "
        "because the allocator frees cached blocks at the limit; each time it synchronizes the device, which the step "
        "time does not include"
    )


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
