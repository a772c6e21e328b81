"""Family: what a model_type of a Hugging Face config.json says, and what holds for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.model.architecture import LlamaArchitecture

WIDTH_OF_HEADS = "hidden_size / num_attention_heads"
"""Marks the default that is computed."""
ELSEWHERE = "choose another model, or bring it as a class of your own (model.source = my_module:MyModel)"
"""What a user can do about a model that is not computed here."""

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
}
OPTIONAL = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type."""

    title: str
    """Beginning of its class names in transformers."""
    defaults: Mapping[str, Any]
    """Our fields where the key is absent."""
    model_class: str = "ForCausalLM"
    """End of the name of its class with a head for the next token."""
    architecture: type[LlamaArchitecture] = LlamaArchitecture
    """Our class."""
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    """Keys that every config must have, all whole numbers above 0 -> our fields."""
    optional: Mapping[str, str] = field(default_factory=lambda: OPTIONAL)
    """Keys for which transformers has a default -> our fields."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that the model_type alone decides."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that would change the model, with the one value that leaves it as ours is; ONLY holds for all families."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that an export adds."""
    harmless: frozenset[str] = frozenset()
    """Keys of this family that do not change the logits; HARMLESS holds for all families."""
    has_window_switch: bool = False
    """Whether sliding_window counts where use_sliding_window is true."""
    rope_types: tuple[str, ...] = ("default", "llama3")
    """The stretches of RoPE that are computed; none where the model has no RoPE."""
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    """The stretch of RoPE where the config has none."""
    dropouts: tuple[str, ...] = ()
    """Keys of dropout rates, which are read but not applied; other families have attention_dropout, which must be 0."""


ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
}

HARMLESS = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "initializer_range"),
        *("use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions"),
        *("max_length", "temperature", "top_p", "top_k", "do_sample", "use_auth_token", "attn_implementation"),
        *("max_sequence_length", "finetuning_task", "tokenizer_class"),
        # Of SmolLM (that it is a Llama, and the dtype for transformers.js) and of unsloth.
        *("is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        # These count only with use_sliding_window; layer_types is looked into on its own.
        *("sliding_window", "max_window_layers", "layer_types"),
    }
)
"""Provenance, storage, generation defaults, other heads."""
