"""StepDecomposition: where the seconds of a step go, by component; predicted, simulated and measured alike."""

from __future__ import annotations

import math
from typing import Self

from pydantic import NonNegativeFloat, model_serializer
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from meshwright.spec.frozen import Frozen


class StepDecomposition(Frozen):
    """A step's seconds by component; `total_s` is their sum.

    Formulas distinguish the causes of computation, from the physical floor upwards (floor_s to repeat_s), and jitter_s;
    timelines, simulated or measured, have COMPONENTS. As JSON it holds the components that its source distinguishes.
    """

    floor_s: NonNegativeFloat = 0.0
    """Model FLOPs over the dense peak of the matmul dtype: no step can take less."""
    matmul_s: NonNegativeFloat = 0.0
    """What large matmuls take above the floor: no device reaches its peak."""
    tile_s: NonNegativeFloat = 0.0
    """Tiles and waves that a matmul of this shape fills in part."""
    attention_s: NonNegativeFloat = 0.0
    """What attention takes above the floor."""
    memory_s: NonNegativeFloat = 0.0
    """Norms, activations, casts, losses: ops that are bound by device memory."""
    repeat_s: NonNegativeFloat = 0.0
    """Backward of compiled blocks that a split backward runs a second time."""
    compute_s: NonNegativeFloat = 0.0
    """Forward and backward on the device, causes not distinguished, with FSDP2's casts, copies within the device's
    memory and sums of gradients."""
    recompute_s: NonNegativeFloat = 0.0
    """Forward that is recomputed in the backward (activation_checkpoint)."""
    tp_s: NonNegativeFloat = 0.0
    """Exposed tensor-parallel collectives, of experts too (etp): no computation hides them, here and below."""
    cp_s: NonNegativeFloat = 0.0
    """Exposed context-parallel communication."""
    ep_s: NonNegativeFloat = 0.0
    """Exposed expert-parallel all-to-alls."""
    dp_s: NonNegativeFloat = 0.0
    """Exposed data-parallel all-gathers and reductions (FSDP, expert FSDP, dp_replicate), and copies of offloaded
    parameters and gradients between the memories of the host and the device."""
    pp_s: NonNegativeFloat = 0.0
    """Exposed pipeline P2P: messages between stages, in flight while nothing is computed."""
    other_s: NonNegativeFloat = 0.0
    """Exposed collectives of groups without an axis, such as all ranks: norm, loss; other copies between the memories
    of the host and the device."""
    jitter_s: NonNegativeFloat = 0.0
    """Stragglers: the slowest of many ranks, which the others wait for in collectives of any axis."""
    bubble_s: NonNegativeFloat = 0.0
    """Pipeline bubble: ranks that wait for a message which has not been sent yet, of the first microbatch, after the
    last, or of a slower stage."""
    optimizer_s: NonNegativeFloat = 0.0
    """Gradient clipping and the optimizer update: what the device computes after the last backward, without FSDP2."""
    data_s: NonNegativeFloat = 0.0
    """The host reads the next samples while the device is idle; formulas expect data in time."""
    host_s: NonNegativeFloat = 0.0
    """CPU-bound: the device waits for kernel launches, Python, the fixed work of a step."""

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


COMPONENT_NAMES = {
    "floor_s": "model FLOPs at the dense peak",
    "matmul_s": "GEMM inefficiency",
    "tile_s": "tile and wave quantization",
    "attention_s": "attention inefficiency",
    "memory_s": "norms, activations, loss (memory)",
    "compute_s": "compute",
    "host_s": "CPU-bound (kernel launches)",
    "recompute_s": "recomputation",
    "repeat_s": "compiled backward run twice (split)",
    "tp_s": "tensor-parallel communication",
    "cp_s": "context-parallel communication",
    "ep_s": "expert-parallel communication",
    "dp_s": "data-parallel communication",
    "pp_s": "pipeline P2P",
    "other_s": "other communication",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "data_s": "reading data",
    "jitter_s": "stragglers",
}
"""What each component is called in tables and messages, in their order."""
assert sorted(COMPONENT_NAMES) == sorted(StepDecomposition.model_fields)

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
