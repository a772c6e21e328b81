"""What a decoder-only transformer is, TransformerConfig, and what it computes, op by op in the order of forward.

TransformerConfig: the sizes and switches that determine the ops of a decoder-only transformer.
Architectures that we train and models of published runs both become one; transformer_ops makes its ops.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.model.moe_architecture import LatentAttention
from meshwright.spec.model.op import (
    CoreAttention,
    Elementwise,
    ElementwiseRole,
    Embedding,
    GroupedMatmul,
    Head,
    Matmul,
    Norm,
    Op,
    Part,
    Rope,
    TensorSplit,
)

_PATHS: dict[Part, str] = {"experts": "ffn.experts", "shared_experts": "ffn.shared"}
"""Module path of a part within its block, where it is not the part's own name."""


def embedding_ops(config: TransformerConfig) -> tuple[Op, ...]:
    """Return the ops before the blocks."""
    tokens = Embedding(name="embedding", vocab_size=config.vocab_size, dim=config.dim)
    if config.num_positions is None:
        return (tokens,)
    return tokens, Embedding(name="positions", vocab_size=config.num_positions, dim=config.dim)


def head_ops(config: TransformerConfig) -> tuple[Op, ...]:
    """Return the ops after the blocks."""
    dim, vocab_size = config.dim, config.vocab_size
    norm = Norm(name="norm", part="head", width=dim, has_bias=config.has_layer_norm)
    head = Head(name="head", dim=dim, vocab_size=vocab_size, tied=config.tie_embeddings)
    if not config.predicts_second_token:
        return norm, head
    return norm, head, Head(name="prediction.head", dim=dim, vocab_size=vocab_size, tied=True)


def block_ops(config: TransformerConfig, blocks: BlocksConfig) -> tuple[Op, ...]:
    """Return the ops of one of `blocks`."""
    dim, ffn = config.dim, blocks.ffn
    num_terms = 3 if isinstance(ffn, MoEConfig) and ffn.shared is not None else 2
    return (
        Norm(name="attention_norm", part="attention", width=dim, has_bias=config.has_layer_norm),
        *_attention(dim, blocks.attention),
        _elementwise("attention", "residual", 2 * dim, dim),
        Norm(name="ffn_norm", part="ffn", width=dim, has_bias=config.has_layer_norm),
        *(_moe(dim, ffn) if isinstance(ffn, MoEConfig) else _mlp("ffn", dim, ffn)),
        _elementwise("ffn", "residual", num_terms * dim, dim),
    )


def _attention(dim: int, config: AttentionConfig) -> tuple[Op, ...]:
    latent, values = config.latent, config.num_heads * config.value_head_dim
    return (
        *(_projections(dim, config) if latent is None else _latent_projections(dim, config, latent)),
        CoreAttention(
            name="attention",
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_head_dim=config.value_head_dim,
            causal=True,
            window=config.window,
        ),
        _linear("attention", "output", (values, dim), "rows", config.output_bias),
    )


def _projections(dim: int, config: AttentionConfig) -> tuple[Op, ...]:
    head_dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    widths = {"query": heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
    linears = (_linear("attention", name, (dim, width), "columns", config.qkv_bias) for name, width in widths.items())
    norms = (_head_norm(name, head_dim, number) for name, number in (("query", heads), ("key", kv_heads)))
    rope = Rope(name="attention.rope", num_heads=heads + kv_heads, head_dim=head_dim)
    return (*linears, *(norms if config.qk_norm else ()), *((rope,) if config.has_rope else ()))


def _latent_projections(dim: int, config: AttentionConfig, latent: LatentAttention) -> tuple[Op, ...]:
    heads, rank = config.num_heads, latent.query_rank
    queries, kv_heads = heads * config.head_dim, heads * (latent.plain_head_dim + latent.value_head_dim)
    query: tuple[Op, ...] = (_linear("attention", "query", (dim, queries), "columns"),)
    if rank is not None:
        query = (
            _linear("attention", "query_down", (dim, rank)),
            Norm(name="attention.query_norm", part="attention", input="latent", width=rank),
            _linear("attention", "query_up", (rank, queries), "columns"),
        )
    return (
        *query,
        _linear("attention", "kv_down", (dim, latent.kv_rank + latent.rope_head_dim)),
        Norm(name="attention.kv_norm", part="attention", input="latent", width=latent.kv_rank),
        _linear("attention", "kv_up", (latent.kv_rank, kv_heads), "columns"),
        # RoPE rotates one part of the key for all heads.
        Rope(name="attention.rope", num_heads=heads + 1, head_dim=latent.rope_head_dim),
    )


def _mlp(part: Part, dim: int, config: MLPConfig) -> tuple[Op, ...]:
    width, names = config.ffn_dim, _inputs(config)
    return (
        *(_linear(part, name, (dim, width), "columns", config.has_bias) for name in names),
        _elementwise(part, config.activation, len(names) * width, width),
        _linear(part, "down", (width, dim), "rows", config.has_bias),
    )


def _moe(dim: int, config: MoEConfig) -> tuple[Op, ...]:
    chosen, expert = config.experts_per_token, config.expert
    rows, widths, names = chosen * dim, chosen * expert.ffn_dim, _inputs(expert)
    biased = config.num_bias_passes * widths
    return (
        Matmul(name="ffn.router", part="router", in_features=dim, out_features=config.num_experts),
        _elementwise("experts", "permute", rows, rows),
        *(_experts(config, name, (dim, expert.ffn_dim), "columns") for name in names),
        _elementwise("experts", expert.activation, len(names) * widths, widths),
        _experts(config, "down", (expert.ffn_dim, dim), "rows"),
        *((_elementwise("experts", "bias", biased, biased),) if biased else ()),
        _elementwise("experts", "unpermute", rows, rows),
        _elementwise("experts", "combine", rows, dim),
        *(() if config.shared is None else _mlp("shared_experts", dim, config.shared)),
    )


def _inputs(config: MLPConfig) -> tuple[str, ...]:
    """Return the names of the linear layers that read a network's input."""
    return ("gate", "up") if config.is_gated else ("up",)


def _head_norm(name: str, head_dim: int, num_heads: int) -> Norm:
    name = f"attention.{name}_norm"
    return Norm(name=name, part="attention", input="heads", width=head_dim, vectors_per_token=num_heads)


def _linear(
    part: Part, name: str, features: tuple[int, int], split: TensorSplit = "none", has_bias: bool = False
) -> Matmul:
    """Return a linear layer with (in, out) `features`."""
    return Matmul(
        name=f"{_PATHS.get(part, part)}.{name}",
        part=part,
        in_features=features[0],
        out_features=features[1],
        tensor_split=split,
        has_bias=has_bias,
    )


def _experts(config: MoEConfig, name: str, features: tuple[int, int], split: TensorSplit) -> GroupedMatmul:
    """Return the linear layer of that name of all experts, with (in, out) `features` of one."""
    return GroupedMatmul(
        name=f"ffn.experts.{name}",
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        in_features=features[0],
        out_features=features[1],
        tensor_split=split,
    )


def _elementwise(part: Part, role: ElementwiseRole, reads: int, writes: int) -> Elementwise:
    name = f"{_PATHS.get(part, part)}.{role}"
    return Elementwise(name=name, part=part, role=role, reads_per_token=reads, writes_per_token=writes)


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention with its projections."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a query or key head."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None for separate query, key and value projections."""
    window: int | None = None
    """Sliding window: last tokens that each one attends to, itself included; None for the whole sequence."""
    has_rope: bool = True
    qk_norm: bool = False
    """Whether each query and key head is normalised."""
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def value_head_dim(self) -> int:
        """Return the width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim


@dataclass(frozen=True)
class MLPConfig:
    """A dense feed-forward network."""

    ffn_dim: int
    """Width between its matmuls."""
    is_gated: bool = True
    """Whether the activation of a gate multiplies what is projected up, as in SwiGLU; else it has no gate: GELU."""
    has_bias: bool = False

    @property
    def activation(self) -> ElementwiseRole:
        """Return what is between its matmuls."""
        return "gated_activation" if self.is_gated else "activation"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts."""

    num_experts: int
    experts_per_token: int
    expert: MLPConfig
    """Of one routed expert."""
    shared: MLPConfig | None = None
    """Of the shared experts together; None without."""
    num_bias_passes: int = 0
    """Times that biases, clamps and scales read and write an expert's ffn_dim, each by an operator of its own."""


@dataclass(frozen=True)
class BlocksConfig:
    """`count` equal blocks in a row."""

    count: int
    attention: AttentionConfig
    ffn: MLPConfig | MoEConfig


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer."""

    vocab_size: int
    dim: int
    """Width of the residual stream."""
    blocks: tuple[BlocksConfig, ...]
    """In the order of forward."""
    num_positions: int | None = None
    """Rows of the learned position embedding; None without one."""
    has_layer_norm: bool = False
    """Whether the norms of the residual stream are LayerNorm with a bias; else they are RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    predicts_second_token: bool = False
    """Whether a multi-token prediction module applies the head a second time; its block is one of `blocks`."""
