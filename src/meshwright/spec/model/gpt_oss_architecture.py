"""GptOssArchitecture: the sizes of a mixture of experts with attention sinks, biases and clamped SwiGLU."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.model.architecture import LayerType
from meshwright.spec.model.moe_architecture import MoEArchitecture

SWIGLU_GAIN = 1.702
"""Factor in the sigmoid of GPT-OSS's SwiGLU."""


class GptOssArchitecture(MoEArchitecture):
    """A MoEArchitecture with a sink for each query head and biases in attention, router and experts.

    An expert computes down((up + 1) x gate x sigmoid(1.702 gate)), with gate and up clamped.
    """

    qkv_bias: bool = True
    """Whether the query, key and value projections add a bias; the output projection always does."""
    sliding_window: PositiveInt | None = 128
    """Positions that a query of a sliding_attention layer attends to, its own included. None for all."""
    layer_types: Annotated[tuple[LayerType, ...], Field(strict=False, min_length=1)] = (
        "sliding_attention",
        "full_attention",
    )
    """Which layers have the sliding window, if there is one; repeated over the layers."""
    swiglu_limit: PositiveFloat = 7.0
    """Largest value of an expert's gate, and largest magnitude of its up projection."""

    @property
    def has_sinks_and_output_bias(self) -> bool:
        """Return whether query heads have a learned logit in the softmax's denominator, and all projections a bias."""
        return True

    @model_validator(mode="after")
    def _is_gpt_oss(self) -> GptOssArchitecture:
        if self.latent is not None:
            raise ValueError("latent attention has no sinks, which GPT-OSS has: leave latent out")
        return self
