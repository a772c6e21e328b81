"""Name map of Llama as Meta and torchtitan name its tensors; their RoPE turns neighbouring rows of queries and keys."""

from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import Drop, NameMap, Rename


def meta_map(architecture: LlamaArchitecture) -> NameMap:
    """Return the name map of `architecture`."""
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
