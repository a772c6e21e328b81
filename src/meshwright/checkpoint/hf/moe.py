"""Name maps of Mixtral, Qwen3-MoE and DeepSeek-V3.

A Hugging Face folder has one tensor per expert, a checkpoint has one for all experts of a layer. For DeepSeek,
transformers and our model both rotate neighbouring dimensions, so the weights are not permuted.
"""

from meshwright.checkpoint.hf.llama import FEED_FORWARD, FREQUENCIES, GROUPED_ATTENTION, SHARED_BY_ALL
from meshwright.checkpoint.hf.name_map import NameMap, Rename

_EXPERTS = (
    Rename("blocks.{i}.ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
    Rename("blocks.{i}.ffn.experts.gate", "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"),
    Rename("blocks.{i}.ffn.experts.up", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
    Rename("blocks.{i}.ffn.experts.down", "model.layers.{i}.mlp.experts.{e}.down_proj.weight"),
)

MIXTRAL = NameMap(
    (
        *SHARED_BY_ALL,
        *GROUPED_ATTENTION,
        Rename("blocks.{i}.ffn.router.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
        Rename("blocks.{i}.ffn.experts.gate", "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight"),
        Rename("blocks.{i}.ffn.experts.up", "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight"),
        Rename("blocks.{i}.ffn.experts.down", "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
    ),
    drops=(FREQUENCIES,),
)

QWEN3_MOE = NameMap((*SHARED_BY_ALL, *GROUPED_ATTENTION, *FEED_FORWARD, *_EXPERTS))

DEEPSEEK_V3 = NameMap(
    (
        *SHARED_BY_ALL,
        Rename("blocks.{i}.attention.query.weight", "model.layers.{i}.self_attn.q_proj.weight"),
        Rename("blocks.{i}.attention.query_down.weight", "model.layers.{i}.self_attn.q_a_proj.weight"),
        Rename("blocks.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_a_layernorm.weight"),
        Rename("blocks.{i}.attention.query_up.weight", "model.layers.{i}.self_attn.q_b_proj.weight"),
        Rename("blocks.{i}.attention.kv_down.weight", "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"),
        Rename("blocks.{i}.attention.kv_norm.weight", "model.layers.{i}.self_attn.kv_a_layernorm.weight"),
        Rename("blocks.{i}.attention.kv_up.weight", "model.layers.{i}.self_attn.kv_b_proj.weight"),
        *FEED_FORWARD,
        *_EXPERTS,
        # Buffers have this prefix in a checkpoint.
        Rename("buffer.blocks.{i}.ffn.router.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
        Rename("blocks.{i}.ffn.shared.gate.weight", "model.layers.{i}.mlp.shared_experts.gate_proj.weight"),
        Rename("blocks.{i}.ffn.shared.up.weight", "model.layers.{i}.mlp.shared_experts.up_proj.weight"),
        Rename("blocks.{i}.ffn.shared.down.weight", "model.layers.{i}.mlp.shared_experts.down_proj.weight"),
    ),
    drops=(FREQUENCIES,),
)
