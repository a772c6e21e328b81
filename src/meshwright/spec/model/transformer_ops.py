"""transformer_ops: what a decoder-only transformer computes, op by op in the order of forward."""

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
from meshwright.spec.model.transformer_config import (
    AttentionConfig,
    BlocksConfig,
    MLPConfig,
    MoEConfig,
    TransformerConfig,
)

_PATHS: dict[Part, str] = {"experts": "ffn.experts", "shared_experts": "ffn.shared", "router": "ffn"}
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
            has_sinks=config.has_sinks,
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
        _linear("router", "router", (dim, config.num_experts), has_bias=config.router_bias),
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
        has_bias=config.expert.has_bias,
    )


def _elementwise(part: Part, role: ElementwiseRole, reads: int, writes: int) -> Elementwise:
    name = f"{_PATHS.get(part, part)}.{role}"
    return Elementwise(name=name, part=part, role=role, reads_per_token=reads, writes_per_token=writes)
