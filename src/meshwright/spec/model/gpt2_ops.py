"""gpt2_ops: what GPT-2 computes, op by op (models/gpt2.py)."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.op import Attention, Elementwise, Embedding, Head, Matmul, Norm, Op


class ModelOps(NamedTuple):
    """The ops of a model whose blocks are all alike."""

    first: tuple[Op, ...]
    """Before the blocks."""
    block: tuple[Op, ...]
    """Of one block."""
    last: tuple[Op, ...]
    """After the blocks."""


def gpt2_ops(architecture: GPT2Architecture) -> ModelOps:
    """Return the ops in the order of forward."""
    dim, vocab_size = architecture.dim, architecture.vocab_size
    return ModelOps(
        first=(
            Embedding(name="embedding", vocab_size=vocab_size, dim=dim),
            Embedding(name="positions", vocab_size=architecture.max_seq_len, dim=dim),
        ),
        block=(*_attention_ops(architecture), *_ffn_ops(architecture)),
        last=(
            Norm(name="norm", width=dim, has_bias=True),
            Head(name="head", dim=dim, vocab_size=vocab_size, tied=architecture.tie_embeddings),
        ),
    )


def _attention_ops(architecture: GPT2Architecture) -> tuple[Op, ...]:
    dim, width = architecture.dim, architecture.attention_dim
    return (
        Norm(name="attention_norm", width=dim, has_bias=True),
        *(
            Matmul(name=f"attention.{part}", in_features=dim, out_features=width, tensor_split="columns", has_bias=True)
            for part in ("query", "key", "value")
        ),
        Attention(
            name="attention",
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            value_head_dim=architecture.head_dim,
            causal=True,
        ),
        Matmul(name="attention.output", in_features=width, out_features=dim, tensor_split="rows", has_bias=True),
        Elementwise(name="attention_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _ffn_ops(architecture: GPT2Architecture) -> tuple[Op, ...]:
    dim, ffn_dim = architecture.dim, architecture.ffn_dim
    return (
        Norm(name="ffn_norm", width=dim, has_bias=True),
        Matmul(name="ffn.up", in_features=dim, out_features=ffn_dim, tensor_split="columns", has_bias=True),
        Elementwise(name="ffn.gelu", reads_per_token=ffn_dim, writes_per_token=ffn_dim, keeps_inputs=True),
        Matmul(name="ffn.down", in_features=ffn_dim, out_features=dim, tensor_split="rows", has_bias=True),
        Elementwise(name="ffn_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )
