"""LlamaArchitecture and GPT2Architecture: the sizes that make one dense model, Qwen3 included."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.frozen import Frozen


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
    """Positions that a query attends to, its own included; sequences beyond it are refused. None for all."""
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


_OF_LLAMA_ONLY = ("rope_scaling", "qk_norm", "qkv_bias", "sliding_window")


class GPT2Architecture(LlamaArchitecture):
    """A LlamaArchitecture with learned positions for RoPE, LayerNorm for RMSNorm and a plain GELU network for SwiGLU.

    Every linear layer but the head has a bias. rope_theta means nothing here.
    """

    max_seq_len: PositiveInt = 1024
    """Rows of the position embedding: tokens in the longest sequence that the model can take."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Greatest dropout rate of the model's config; training does not apply it, and says so where it is not 0."""

    @model_validator(mode="after")
    def _is_gpt2(self) -> GPT2Architecture:
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads}, but in GPT-2 each of the num_heads = {self.num_heads} query "
                f"heads has a key head: set num_kv_heads to {self.num_heads}"
            )
        defaults: dict[str, Any] = {name: LlamaArchitecture.model_fields[name].default for name in _OF_LLAMA_ONLY}
        if wrong := [name for name, default in defaults.items() if getattr(self, name) != default]:
            raise ValueError(f"{wrong[0]} = {getattr(self, wrong[0])} is no part of GPT-2: leave it out")
        return self


def dropout_note(architecture: LlamaArchitecture | None) -> str | None:
    """Return what a user has to know about the dropout of the model's config, None where it has none."""
    if not isinstance(architecture, GPT2Architecture) or not architecture.dropout:
        return None
    return (
        f"the model's config has dropout {architecture.dropout}, which is not applied: training uses all activations "
        "(model.options.dropout = 0 says that this is meant)"
    )
