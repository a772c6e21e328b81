"""Name map of GPT-2.

transformers stores GPT-2's linear layers as (in, out), so their weights are transposed, and fuses queries, keys and
values in one layer, each a third of its outputs.
"""

from meshwright.checkpoint.hf.maps.llama import HEAD
from meshwright.spec.model.hf.name_map import Drop, NameMap, Part, Rename

_BLOCK, _THEIR_BLOCK = "blocks.{i}", "transformer.h.{i}"
_LINEAR = {"attention.output": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
_FUSED = ("attention.query", "attention.key", "attention.value")
_THIRDS = (1, 1, 1)
_NORMS = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}

GPT2 = NameMap(
    (
        Rename("embedding.weight", "transformer.wte.weight"),
        Rename("positions.weight", "transformer.wpe.weight"),
        *(
            Rename(f"{_BLOCK}.{ours}.{kind}", f"{_THEIR_BLOCK}.{theirs}.{kind}")
            for ours, theirs in _NORMS.items()
            for kind in ("weight", "bias")
        ),
        *(
            Rename(f"{_BLOCK}.{ours}.weight", f"{_THEIR_BLOCK}.{theirs}.weight", is_transposed=True)
            for ours, theirs in _LINEAR.items()
        ),
        *(Rename(f"{_BLOCK}.{ours}.bias", f"{_THEIR_BLOCK}.{theirs}.bias") for ours, theirs in _LINEAR.items()),
        *(
            Rename(f"{_BLOCK}.{ours}.{kind}", f"{_THEIR_BLOCK}.attn.c_attn.{kind}", dim == 1, Part(index, _THIRDS, dim))
            for index, ours in enumerate(_FUSED)
            for kind, dim in (("weight", 1), ("bias", 0))
        ),
        Rename("norm.weight", "transformer.ln_f.weight"),
        Rename("norm.bias", "transformer.ln_f.bias"),
        Rename("head.weight", HEAD),
    ),
    drops=(
        Drop(f"{_THEIR_BLOCK}.attn.bias", "the causal mask; old files stored it"),
        Drop(f"{_THEIR_BLOCK}.attn.masked_bias", "the value of masked scores; old files stored it"),
    ),
    prefix="transformer.",
)
