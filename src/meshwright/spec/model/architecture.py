"""LlamaArchitecture: the sizes that make one model of the Llama family, Qwen3 included."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.frozen import Frozen

LayerType = Literal["sliding_attention", "full_attention"]
"""A layer's attention, as Hugging Face configs name it."""


class RopeScaling(Frozen):
    """How Llama 3.1 stretches its rotary wavelengths to reach beyond the length it was pretrained on."""

    factor: float = Field(ge=1)
    """How many times longer the longest wavelengths become."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched in full."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor stay as they are; those between are blended."""
    original_max_seq_len: PositiveInt = 8192
    """Tokens in the longest sequence before the stretch."""

    @model_validator(mode="after")
    def _has_a_band(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} must be below high_freq_factor = {self.high_freq_factor}"
            )
        return self


class LlamaArchitecture(Frozen):
    """The sizes of a decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    vocab_size: PositiveInt
    """Rows of the embedding: one more than the highest token id that the model can take."""
    dim: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Transformer blocks."""
    num_heads: PositiveInt
    """Query heads of one attention."""
    num_kv_heads: PositiveInt
    """Key and value heads of one attention; each serves num_heads / num_kv_heads query heads."""
    head_dim: PositiveInt
    """Width of one head; num_heads x head_dim need not equal dim."""
    ffn_dim: PositiveInt
    """Width inside the feed-forward network."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary wavelengths: the longest is 2 pi x nearly rope_theta positions."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's stretch of the long wavelengths; none leaves them as rope_theta makes them."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    qk_norm: bool = False
    """Whether each query and key head is RMS-normalised before RoPE, as in Qwen3."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias, as in Qwen2."""
    sliding_window: PositiveInt | None = None
    """Positions that a query of a sliding_attention layer attends to, its own included. None for all."""
    layer_types: Annotated[tuple[LayerType, ...], Field(strict=False, min_length=1)] = ("sliding_attention",)
    """Which layers have the sliding window, if there is one; repeated over the layers."""
    max_seq_len: PositiveInt = 8192
    """Tokens in the longest sequence that the model is meant for; sizes nothing."""

    @model_validator(mode="after")
    def _divides(self) -> LlamaArchitecture:
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.num_kv_heads))[:2])
            raise ValueError(
                f"num_heads = {self.num_heads} does not divide by num_kv_heads = {self.num_kv_heads}: "
                f"set num_kv_heads to {' or '.join(str(n) for n in nearest)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} is odd, but RoPE turns pairs: "
                f"set it to {max(2, self.head_dim - 1)} or {self.head_dim + 1}"
            )
        return self

    @property
    def has_sinks_and_output_bias(self) -> bool:
        """Return whether query heads have a learned logit in the softmax's denominator, and all projections a bias."""
        return False

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of one layer, None where it attends to all positions."""
        return self.sliding_window if self.layer_types[layer % len(self.layer_types)] == "sliding_attention" else None

    @property
    def attention_dim(self) -> int:
        """Return the width of all query heads together: the output projection's input."""
        return self.num_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Return the width of the part of a head that RoPE turns."""
        return self.head_dim

    @property
    def kv_dim(self) -> int:
        """Return the width of all key heads together, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim
