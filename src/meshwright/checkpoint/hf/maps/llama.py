"""Name maps of Llama, Mistral, Qwen2 and Qwen3, of Phi-3 and Phi-4, and of Llama as Meta names its tensors.

RoPE rotates the same pairs (i, i + head_dim / 2) and linear layers are (out, in) in both, so weights are neither
permuted nor transposed; Meta's RoPE rotates neighbouring rows of queries and keys.
"""

from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import Drop, NameMap, Part, Rename

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


def phi3_map(architecture: LlamaArchitecture) -> NameMap:
    """Return the name map of Phi-3 and Phi-4, a Llama whose projections are fused along their outputs.

    Queries, keys and values are one tensor of theirs, the gate and up projections another.
    """
    heads = (architecture.num_heads, architecture.num_kv_heads, architecture.num_kv_heads)
    return NameMap(
        (
            *SHARED_BY_ALL,
            *(
                Rename(
                    f"blocks.{{i}}.attention.{ours}.weight",
                    "model.layers.{i}.self_attn.qkv_proj.weight",
                    part=Part(index, heads),
                )
                for index, ours in enumerate(("query", "key", "value"))
            ),
            *(
                Rename(
                    f"blocks.{{i}}.ffn.{ours}.weight",
                    "model.layers.{i}.mlp.gate_up_proj.weight",
                    part=Part(index, (1, 1)),
                )
                for index, ours in enumerate(("gate", "up"))
            ),
            Rename("blocks.{i}.ffn.down.weight", "model.layers.{i}.mlp.down_proj.weight"),
        ),
        drops=(FREQUENCIES,),
    )


def meta_map(architecture: LlamaArchitecture) -> NameMap:
    """Return the name map of a Llama in the names of Meta and torchtitan."""
    blocks, layers = "blocks.{i}", "layers.{i}"
    plain = {"attention.value": "attention.wv", "attention.output": "attention.wo", "attention_norm": "attention_norm"}
    plain |= {"ffn_norm": "ffn_norm", "ffn.gate": "feed_forward.w1", "ffn.down": "feed_forward.w2"}
    plain |= {"ffn.up": "feed_forward.w3"}
    rotated = {"query": ("wq", architecture.num_heads), "key": ("wk", architecture.num_kv_heads)}
    reason = "the frequencies of RoPE follow from rope_theta"
    return NameMap(
        (
            Rename("embedding.weight", "tok_embeddings.weight"),
            *(Rename(f"{blocks}.{ours}.weight", f"{layers}.{theirs}.weight") for ours, theirs in plain.items()),
            *(
                Rename(
                    f"{blocks}.attention.{ours}.weight", f"{layers}.attention.{theirs}.weight", interleaved_heads=heads
                )
                for ours, (theirs, heads) in rotated.items()
            ),
            Rename("norm.weight", "norm.weight"),
            Rename("head.weight", "output.weight"),
        ),
        drops=(Drop("rope.freqs", reason), Drop("freqs_cis", reason)),
    )
