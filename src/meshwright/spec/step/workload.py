"""Workload: what one optimizer step processes, whatever it is split over."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.step.adapter import Adapter

Precision = Literal[
    "float64", "float32", "bfloat16", "float16", "float8-tensorwise", "float8-rowwise", "float8-rowwise-with-gw-hp",
    "mxfp8", "nvfp4",
]  # fmt: skip
"""Format of the blocks' matmuls; below 16 bits the rest (attention, norms, head) is in Workload.wide_dtype.

float8-rowwise-with-gw-hp: gradients of weights are products in wide_dtype.
"""

FLOAT8_PRECISIONS: dict[str, Precision] = {
    "tensorwise": "float8-tensorwise",
    "rowwise": "float8-rowwise",
    "rowwise_with_gw_hp": "float8-rowwise-with-gw-hp",
    "mxfp8": "mxfp8",
}
"""Those that our trainer computes, by precision.float8."""

MATMUL_DTYPE: dict[str, str] = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float8-tensorwise": "float8",
    "float8-rowwise": "float8",
    "float8-rowwise-with-gw-hp": "float8",
    "mxfp8": "float8",
    "nvfp4": "float4",
}
"""The dtype whose rate a Device states, by precision."""

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Size of the formats that activations and gradients have."""


class Workload(Frozen):
    """The tokens of one step and the formats that they are computed in."""

    seq_len: PositiveInt
    """Tokens in one sequence."""
    global_batch_size: PositiveInt
    """Sequences in one optimizer step over all ranks."""
    precision: Precision = "bfloat16"
    """Format of the blocks' matmuls."""
    float8_experts: bool = False
    """Whether experts' grouped matmuls are in float8 by rows, but for the gradients of weights (ours)."""
    wide_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Format of all else where that has fewer than 16 bits."""
    gradient_dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Format in which gradients are summed over ranks."""
    sums_exactly: bool = False
    """Whether gradients are rounded before they are added up, so that sums have no order (ours)."""
    masks_documents: bool = False
    """Whether tokens attend within their own document only."""
    document_tokens: PositiveFloat | None = None
    """Mean tokens of a document; None where it is unknown, as if each sequence were one."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer; with muon AdamW updates what is not a matrix of a block."""
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of the optimizer's moments between steps; masters are float32."""
    updates_in_backward: bool = False
    """Whether each parameter is updated as soon as its gradient is reduced."""

    counts_accuracy: bool = False
    """Whether the loss counts the targets that the model ranks first (ours)."""
    pairs_answers: bool = False
    """Whether the loss is of pairs of answers, so that gradients of tokens are known only in backward (ours)."""

    adapter: Adapter = Adapter()
    """What is trained in place of the model's own parameters; none of kind "none"."""

    @property
    def global_batch_tokens(self) -> int:
        """Return the tokens of one optimizer step over all ranks."""
        return self.seq_len * self.global_batch_size

    @property
    def matmul_dtype(self) -> str:
        """Return the dtype of the blocks' matmuls as Device rates name it."""
        return MATMUL_DTYPE[self.precision]

    @property
    def activation_dtype(self) -> str:
        """Return the dtype of what lies between matmuls: that of the matmuls, or wide_dtype below 16 bits."""
        return self.precision if self.precision in BYTES_PER_ELEMENT else self.wide_dtype

    @property
    def activation_element_bytes(self) -> int:
        """Return the bytes of one element between matmuls."""
        return BYTES_PER_ELEMENT[self.activation_dtype]
