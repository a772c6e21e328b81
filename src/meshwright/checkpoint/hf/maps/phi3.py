"""Name map of Phi-3 and Phi-4: a Llama whose projections are fused along their outputs."""

from meshwright.checkpoint.hf.maps.llama import FREQUENCIES, SHARED_BY_ALL
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import NameMap, Part, Rename

_LAYER = "model.layers.{i}"


def phi3_map(architecture: LlamaArchitecture) -> NameMap:
    """Return the name map: queries, keys and values are one tensor of theirs, the gate and up projections another."""
    heads = (architecture.num_heads, architecture.num_kv_heads, architecture.num_kv_heads)
    return NameMap(
        (
            *SHARED_BY_ALL,
            *(
                Rename(
                    f"blocks.{{i}}.attention.{ours}.weight",
                    f"{_LAYER}.self_attn.qkv_proj.weight",
                    part=Part(index, heads),
                )
                for index, ours in enumerate(("query", "key", "value"))
            ),
            *(
                Rename(f"blocks.{{i}}.ffn.{ours}.weight", f"{_LAYER}.mlp.gate_up_proj.weight", part=Part(index, (1, 1)))
                for index, ours in enumerate(("gate", "up"))
            ),
            Rename("blocks.{i}.ffn.down.weight", f"{_LAYER}.mlp.down_proj.weight"),
        ),
        drops=(FREQUENCIES,),
    )
