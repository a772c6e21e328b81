"""Name maps of Mixtral, Qwen3-MoE, GPT-OSS and DeepSeek-V3.

A Hugging Face folder has one tensor per expert, a checkpoint has one for all experts of a layer. For DeepSeek,
transformers and our model both rotate neighbouring dimensions, so the weights are not permuted.
"""

from dataclasses import replace

from meshwright.checkpoint.hf.maps.llama import FEED_FORWARD, FREQUENCIES, GROUPED_ATTENTION, SHARED_BY_ALL
from meshwright.spec.model.hf.name_map import NameMap, Part, Rename

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

_LAYER = "model.layers.{i}"
_GATE_AND_UP = tuple(enumerate(("gate", "up")))

# Their weights are (in, out), gate and up in alternate columns.
GPT_OSS = NameMap(
    (
        *SHARED_BY_ALL,
        *GROUPED_ATTENTION,
        Rename("blocks.{i}.attention.output.bias", f"{_LAYER}.self_attn.o_proj.bias"),
        Rename("blocks.{i}.attention.sinks.weight", f"{_LAYER}.self_attn.sinks"),
        Rename("blocks.{i}.ffn.router.weight", f"{_LAYER}.mlp.router.weight"),
        Rename("blocks.{i}.ffn.router.logit_bias", f"{_LAYER}.mlp.router.bias"),
        *(
            Rename(
                f"blocks.{{i}}.ffn.experts.{ours}",
                f"{_LAYER}.mlp.experts.gate_up_proj",
                is_transposed=True,
                part=Part(index, (1, 1), dim=2, is_interleaved=True),
                has_experts=True,
            )
            for index, ours in _GATE_AND_UP
        ),
        *(
            Rename(
                f"blocks.{{i}}.ffn.experts.{ours}_bias",
                f"{_LAYER}.mlp.experts.gate_up_proj_bias",
                part=Part(index, (1, 1), dim=1, is_interleaved=True),
                has_experts=True,
            )
            for index, ours in _GATE_AND_UP
        ),
        Rename("blocks.{i}.ffn.experts.down", f"{_LAYER}.mlp.experts.down_proj", is_transposed=True, has_experts=True),
        Rename("blocks.{i}.ffn.experts.down_bias", f"{_LAYER}.mlp.experts.down_proj_bias"),
    ),
)

FUSED_EXPERTS = "experts.gate_up_proj"
"""End of a name that only the modules of transformers 5 have: all experts of a layer in one tensor."""


def with_fused_experts(table: NameMap) -> NameMap:
    """Return the name map of what state_dict returns in transformers 5, where `table` is that of its folders."""
    layer = "model.layers.{i}.mlp"
    fused = (
        Rename("blocks.{i}.ffn.router.weight", f"{layer}.gate.weight"),
        Rename("blocks.{i}.ffn.experts.gate", f"{layer}.{FUSED_EXPERTS}", part=Part(0, (1, 1), dim=1)),
        Rename("blocks.{i}.ffn.experts.up", f"{layer}.{FUSED_EXPERTS}", part=Part(1, (1, 1), dim=1)),
        Rename("blocks.{i}.ffn.experts.down", f"{layer}.experts.down_proj"),
    )
    replaced = {rename.ours for rename in fused}
    return replace(table, renames=(*(row for row in table.renames if row.ours not in replaced), *fused))


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
