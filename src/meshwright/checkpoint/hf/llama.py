"""The names of Llama and Qwen3 here and in Hugging Face folders, and the shapes that belong to them.

RoPE turns the same pairs (i, i + head_dim / 2) in both, so no weight is permuted; and both store a linear layer as
(out, in), so none is transposed: a rename is all there is.
"""

import torch

from meshwright.checkpoint.hf.name_map import Drop, NameMap, Rename
from meshwright.models.llama import Llama
from meshwright.spec.architecture import LlamaArchitecture

HEAD = "lm_head.weight"

LLAMA = NameMap(
    renames=(
        Rename("embedding.weight", "model.embed_tokens.weight"),
        Rename("blocks.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
        Rename("blocks.{i}.attention.query.weight", "model.layers.{i}.self_attn.q_proj.weight"),
        Rename("blocks.{i}.attention.key.weight", "model.layers.{i}.self_attn.k_proj.weight"),
        Rename("blocks.{i}.attention.value.weight", "model.layers.{i}.self_attn.v_proj.weight"),
        Rename("blocks.{i}.attention.output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
        Rename("blocks.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
        Rename("blocks.{i}.attention.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
        Rename("blocks.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
        Rename("blocks.{i}.ffn.gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
        Rename("blocks.{i}.ffn.up.weight", "model.layers.{i}.mlp.up_proj.weight"),
        Rename("blocks.{i}.ffn.down.weight", "model.layers.{i}.mlp.down_proj.weight"),
        Rename("norm.weight", "model.norm.weight"),
        Rename("head.weight", HEAD),
    ),
    drops=(Drop("model.layers.{i}.self_attn.rotary_emb.inv_freq", "follows from rope_theta; old files stored it"),),
)

TIED_LLAMA = NameMap(
    renames=tuple(rename for rename in LLAMA.renames if rename.theirs != HEAD),
    drops=(*LLAMA.drops, Drop(HEAD, "a copy of the embedding, which is compared with it before it is dropped")),
)


def name_map(architecture: LlamaArchitecture) -> NameMap:
    """Return the table for a model with a head of its own, or with a tied one."""
    return TIED_LLAMA if architecture.tie_embeddings else LLAMA


def parameter_shapes(architecture: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by our name, in the model's order."""
    with torch.device("meta"):
        model = Llama(architecture)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
