"""Adapter: low-rank updates of linear layers that are trained in place of the parameters, which stay as they are.

A layer y = W x becomes y = W x + (alpha / rank) B A x, with A [rank, in] drawn at random and B [out, rank] zero at
first (LoRA, Hu et al., arXiv:2106.09685, section 4.1). DoRA also trains the norm of each row of the sum (Liu et al.,
arXiv:2402.09353, equation 5).
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen

ALL_LINEAR_LAYERS = ("blocks.*",)
"""Pattern of all linear layers of the blocks."""
LORA_A: Final = "lora_a"
LORA_B: Final = "lora_b"
MAGNITUDE: Final = "magnitude"
PACKED_SCALE: Final = "weight_scale"
"""How the names of the scales of a base's weight in 8 or 4 bits end: LAYER.weight_scale [out, in / 64]."""
PACKED_BLOCK: Final = 64
"""Elements along the inputs that share a scale."""
BaseDType = Literal["compute", "bfloat16", "int8", "nf4"]
ADAPTER_PARTS: Final = (LORA_A, LORA_B, MAGNITUDE)
"""How the names of an adapter's parameters end: LAYER.lora_a [rank, in], LAYER.lora_b [out, rank], and DoRA's
LAYER.magnitude [out]."""


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
    base_dtype: BaseDType = "compute"
    """Format of the frozen weights of adapted layers: that of the parameters, or 16, 8 or 4 bits, read in compute."""
    initial: str | None = Field(None, examples=["adapters/llama3-8b-chat"])
    """Folder of an adapter in PEFT's format to start from; without it A is random and B zero."""

    @property
    def freezes_base(self) -> bool:
        """Return whether the model's own parameters stay as they are."""
        return self.kind != "none"

    @property
    def packs_base(self) -> bool:
        """Return whether frozen weights of adapted layers have 8 or 4 bits, with scales."""
        return self.freezes_base and self.base_dtype in ("int8", "nf4")

    @property
    def scale(self) -> float:
        """Return the factor of B A x."""
        return self.alpha / self.rank

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the ends of the names of the parameters that each adapted layer gets."""
        return {"none": (), "lora": (LORA_A, LORA_B), "dora": ADAPTER_PARTS}[self.kind]

    def adapted(self, layers: Iterable[str]) -> list[str]:
        """Return those of the names of linear layers of blocks that are adapted, in their order."""
        targets = self.targets if self.freezes_base else ()
        return [layer for layer in layers if any(fnmatchcase(layer, target) for target in targets)]

    def idle_targets(self, layers: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names of linear layers of blocks."""
        names = [*layers]
        targets = self.targets if self.freezes_base else ()
        return [target for target in targets if not any(fnmatchcase(name, target) for name in names)]

    def parameter_shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what an adapted layer gets, by the ends of their names."""
        shapes = {LORA_A: (self.rank, in_features), LORA_B: (out_features, self.rank), MAGNITUDE: (out_features,)}
        return {part: shapes[part] for part in self.parts}
