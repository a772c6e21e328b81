"""Adapter: low-rank updates of linear layers that are trained in place of the parameters, which stay as they are.

A layer y = W x becomes y = W x + (alpha / rank) B A x, with A [rank, in] drawn at random and B [out, rank] zero at
first (LoRA, Hu et al., arXiv:2106.09685, section 4.1). DoRA also trains the norm of each row of the sum (Liu et al.,
arXiv:2402.09353, equation 5).
"""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen

ALL_LINEAR_LAYERS = ("blocks.*",)
"""Pattern of all linear layers of the blocks."""


class Adapter(Frozen):
    """Which layers are adapted, and how; kind "none" trains all parameters."""

    kind: Literal["none", "lora", "dora"] = "none"
    """none (all parameters are trained), lora (low-rank updates), or dora (those and the norms of rows)."""
    rank: PositiveInt = 16
    """Rows of A and columns of B of each adapted layer."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale alpha / rank of the update."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the inputs of A that are zeroed in training."""
    targets: tuple[str, ...] = Field(ALL_LINEAR_LAYERS, strict=False, examples=[["blocks.*.attention.*"]])
    """Patterns of names of linear layers of the blocks that are adapted; head, embedding and router never are."""
    base_dtype: Literal["compute", "int8", "nf4"] = "compute"
    """Format of the frozen weights of adapted layers: that of the parameters, or 8 or 4 bits; extra torchao."""

    @property
    def freezes_base(self) -> bool:
        """Return whether the model's own parameters stay as they are."""
        return self.kind != "none"
