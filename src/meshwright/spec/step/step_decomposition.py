"""StepDecomposition: where the seconds of a step go, by component; predicted, simulated and measured alike."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, NonNegativeFloat, model_serializer
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from meshwright.spec.frozen import Frozen


class StepDecomposition(Frozen):
    """A step's seconds by component; `total_s` is their sum.

    Formulas distinguish the causes of computation, from the physical floor upwards (floor_s to memory_s, repeat_s), and
    jitter_s; timelines, simulated or measured, have COMPONENTS. As JSON it holds the components that its source
    distinguishes.
    """

    floor_s: NonNegativeFloat = Field(0.0, title="model FLOPs at the dense peak")
    """Model FLOPs over the dense peak of the matmul dtype: no step can take less."""
    matmul_s: NonNegativeFloat = Field(0.0, title="GEMM inefficiency")
    """What large matmuls take above the floor: no device reaches its peak."""
    tile_s: NonNegativeFloat = Field(0.0, title="tile and wave quantization")
    """Tiles and waves that a matmul of this shape fills in part."""
    attention_s: NonNegativeFloat = Field(0.0, title="attention inefficiency")
    """What attention takes above the floor."""
    memory_s: NonNegativeFloat = Field(0.0, title="norms, activations, loss (memory)")
    """Norms, activations, casts, losses: ops that are bound by device memory."""
    compute_s: NonNegativeFloat = Field(0.0, title="compute")
    """Forward and backward on the device, causes not distinguished, with FSDP2's casts, copies within the device's
    memory and sums of gradients."""
    host_s: NonNegativeFloat = Field(0.0, title="CPU-bound (kernel launches)")
    """CPU-bound: the device waits for kernel launches, Python, the fixed work of a step."""
    recompute_s: NonNegativeFloat = Field(0.0, title="recomputation")
    """Forward that is recomputed in the backward (activation_checkpoint)."""
    repeat_s: NonNegativeFloat = Field(0.0, title="compiled backward run twice (split)")
    """Backward of compiled blocks that a split backward runs a second time."""
    tp_s: NonNegativeFloat = Field(0.0, title="tensor-parallel communication")
    """Exposed tensor-parallel collectives, of experts too (etp): no computation hides them, here and below."""
    cp_s: NonNegativeFloat = Field(0.0, title="context-parallel communication")
    """Exposed context-parallel communication."""
    ep_s: NonNegativeFloat = Field(0.0, title="expert-parallel communication")
    """Exposed expert-parallel all-to-alls."""
    dp_s: NonNegativeFloat = Field(0.0, title="data-parallel communication")
    """Exposed data-parallel all-gathers and reductions (FSDP, expert FSDP, dp_replicate), and copies of offloaded
    parameters and gradients between the memories of the host and the device."""
    pp_s: NonNegativeFloat = Field(0.0, title="pipeline P2P")
    """Exposed pipeline P2P: messages between stages, in flight while nothing is computed."""
    other_s: NonNegativeFloat = Field(0.0, title="other communication")
    """Exposed collectives of groups without an axis, such as all ranks: norm, loss; other copies between the memories
    of the host and the device."""
    bubble_s: NonNegativeFloat = Field(0.0, title="pipeline bubble")
    """Pipeline bubble: ranks that wait for a message which has not been sent yet, of the first microbatch, after the
    last, or of a slower stage."""
    optimizer_s: NonNegativeFloat = Field(0.0, title="optimizer")
    """Gradient clipping and the optimizer update: what the device computes after the last backward, without FSDP2."""
    data_s: NonNegativeFloat = Field(0.0, title="reading data")
    """The host reads the next samples while the device is idle; formulas expect data in time."""
    jitter_s: NonNegativeFloat = Field(0.0, title="stragglers")
    """Stragglers: the slowest of many ranks, which the others wait for in collectives of any axis."""

    @property
    def distinguished(self) -> tuple[str, ...]:
        """Return the components that the source of this step distinguishes, in the order of COMPONENT_NAMES."""
        return tuple(name for name in COMPONENT_NAMES if name in self.model_fields_set)

    @property
    def total_s(self) -> float:
        """Return the whole step in seconds."""
        return math.fsum(getattr(self, name) for name in type(self).model_fields)

    @property
    def exposed_s(self) -> float:
        """Return the seconds of all communication that no computation hides."""
        return math.fsum((self.tp_s, self.cp_s, self.ep_s, self.dp_s, self.pp_s, self.other_s))

    def summed(self) -> Self:
        """Return the same step in COMPONENTS: what formulas predict, as a timeline would show it."""
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


COMPONENT_NAMES = {name: str(field.title) for name, field in StepDecomposition.model_fields.items()}
"""What each component is called in tables and messages, in their order."""

COMPONENTS = (
    "compute_s", "recompute_s", "tp_s", "cp_s", "ep_s", "dp_s", "pp_s", "other_s", "bubble_s", "optimizer_s", "data_s",
    "host_s",
)  # fmt: skip
"""What a timeline distinguishes, in the order of tables."""
_CAUSES = {
    "compute_s": ("floor_s", "matmul_s", "tile_s", "attention_s", "memory_s", "repeat_s"),
    "other_s": ("jitter_s",),
}
"""By component what formulas distinguish of it."""
assert sorted((*COMPONENTS, *(cause for causes in _CAUSES.values() for cause in causes))) == sorted(COMPONENT_NAMES)
