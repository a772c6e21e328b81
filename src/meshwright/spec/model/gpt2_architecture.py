"""GPT2Architecture: the sizes of a transformer with learned positions, LayerNorm, GELU and a bias in every layer."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from meshwright.spec.model.architecture import LlamaArchitecture

_OF_LLAMA_ONLY = ("rope_scaling", "qk_norm", "qkv_bias", "sliding_window", "layer_types")


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
