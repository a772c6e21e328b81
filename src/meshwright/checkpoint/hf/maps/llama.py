"""Name map of Llama, Mistral, Qwen2 and Qwen3.

RoPE rotates the same pairs (i, i + head_dim / 2) and linear layers are (out, in) in both, so weights are neither
permuted nor transposed.
"""

from meshwright.spec.model.hf.name_map import Drop, NameMap, Rename

HEAD = "lm_head.weight"

SHARED_BY_ALL = (
    Rename("embedding.weight", "model.embed_tokens.weight"),
    Rename("blocks.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Rename("blocks.{i}.attention.output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
    Rename("blocks.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    Rename("norm.weight", "model.norm.weight"),
    Rename("head.weight", HEAD),
)
"""Rows of all Llama-like models, mixtures of experts included."""

GROUPED_ATTENTION = (
    Rename("blocks.{i}.attention.query.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    Rename("blocks.{i}.attention.key.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    Rename("blocks.{i}.attention.value.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    Rename("blocks.{i}.attention.query.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    Rename("blocks.{i}.attention.key.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    Rename("blocks.{i}.attention.value.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    Rename("blocks.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    Rename("blocks.{i}.attention.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
)

FEED_FORWARD = (
    Rename("blocks.{i}.ffn.gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    Rename("blocks.{i}.ffn.up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    Rename("blocks.{i}.ffn.down.weight", "model.layers.{i}.mlp.down_proj.weight"),
)

FREQUENCIES = Drop("model.layers.{i}.self_attn.rotary_emb.inv_freq", "follows from rope_theta; old files stored it")

LLAMA = NameMap((*SHARED_BY_ALL, *GROUPED_ATTENTION, *FEED_FORWARD), drops=(FREQUENCIES,))
