"""model_of: the model of a measured run, op by op, from the shape columns of its row."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.model.model_spec import BlockGroup, ModelSpec
from meshwright.spec.model.op import Attention, Elementwise, Embedding, GroupedMatmul, Head, Matmul, Norm, Op, Rope

_GENERIC_VOCABULARY = 50_304
"""GPT-2's, padded to a multiple of 128."""
_GATED = ("swiglu", "geglu")


def model_of(row: RunRow, assumed: list[str]) -> ModelSpec:
    """Return the row's model, noting in `assumed` what its columns do not say; raises UnsupportedError."""
    dim, num_layers = row.required("hidden"), row.required("n_layers")
    vocab_size = row.count_or("vocab", _GENERIC_VOCABULARY, assumed)
    first = [Embedding(name="embedding", vocab_size=vocab_size, dim=dim)]
    if row.architecture.get("pos") == "learned":
        first.append(Embedding(name="positions", vocab_size=row.count("seq_len") or 2048, dim=dim))
    tied = bool(row.architecture.get("tied_embed", False))
    last: list[Op] = [Norm(name="norm", width=dim), Head(name="head", dim=dim, vocab_size=vocab_size, tied=tied)]
    if _has_prediction_module(row, []):
        last.append(Head(name="prediction.head", dim=dim, vocab_size=vocab_size, tied=True))
    groups = [
        BlockGroup(name="blocks", count=count, ops=ops)
        for count, ops in _block_groups(row, dim, num_layers, assumed)
        if count
    ]
    return ModelSpec(
        groups=(BlockGroup(name="", count=1, ops=tuple(first)), *groups, BlockGroup(name="", count=1, ops=tuple(last)))
    )


def _block_groups(row: RunRow, dim: int, num_layers: int, assumed: list[str]) -> Iterator[tuple[int, tuple[Op, ...]]]:
    """Yield each kind of block with its number: full and windowed attention, dense and mixture of experts."""
    num_experts = row.count("moe_experts") or 0
    num_dense = num_layers if not num_experts else min(row.size("first_dense"), num_layers)
    if num_experts and num_dense and num_dense >= num_layers - 1:
        num_dense = 1  # A model cut to a few layers keeps one dense one.
    # A multi-token prediction module is one more block (DeepSeek-V3).
    extra = int(_has_prediction_module(row, assumed))
    dense, routed = _dense_ffn(row, dim), _moe_ffn(row, dim, assumed) if num_experts else ()
    window, period = row.size("sliding_window"), max(1, row.size("swa_alternate"))
    num_routed = num_layers - num_dense + extra if num_experts else 0
    for count, ffn in ((num_dense, dense), (num_routed, routed)):
        windowed = count // period if window else 0
        yield windowed, (*_attention_ops(row, dim, window or None, assumed), *ffn)
        yield count - windowed, (*_attention_ops(row, dim, None, assumed), *ffn)


def _has_prediction_module(row: RunRow, assumed: list[str]) -> bool:
    if row.count("mtp_modules") is None and "mtp_modules" not in row.assume:
        return False
    return row.count_or("mtp_modules", 1, assumed) > 0


def _attention_ops(row: RunRow, dim: int, window: int | None, assumed: list[str]) -> tuple[Op, ...]:
    heads = row.count("n_heads")
    if heads is None:
        heads = max(1, dim // 128)
        note = f"n_heads={heads}"
        if note not in assumed:
            assumed.append(note)
    kv_heads = row.count("n_kv_heads") or heads
    if str(row.architecture.get("attn", "")).upper() == "MLA":
        core, projections = _latent_attention(row, dim, heads)
    else:
        head_dim = row.size("head_dim") or dim // heads
        core = Attention(
            name="attention",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            causal=True,
            window=window,
        )
        widths = {"query": heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
        projections = [
            Matmul(name=f"attention.{part}", in_features=dim, out_features=width, tensor_split="columns")
            for part, width in widths.items()
        ]
        if row.architecture.get("pos") != "learned":
            projections.append(Rope(name="attention.rope", num_heads=heads + kv_heads, head_dim=head_dim))
    values = heads * core.value_head_dim
    return (
        Norm(name="attention_norm", width=dim),
        *projections,
        core,
        Matmul(name="attention.output", in_features=values, out_features=dim, tensor_split="rows"),
        Elementwise(name="attention_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _latent_attention(row: RunRow, dim: int, heads: int) -> tuple[Attention, list[Op]]:
    missing = [key for key in ("kv_lora", "qk_nope", "qk_rope", "v_head") if not row.size(key)]
    if missing:
        raise UnsupportedError(f"arch_json has attn = MLA but no {', '.join(missing)}")
    query_rank, kv_rank = row.size("q_lora"), row.size("kv_lora")
    plain, turned, value = row.size("qk_nope"), row.size("qk_rope"), row.size("v_head")
    head_dim = plain + turned
    core = Attention(
        name="attention", num_heads=heads, num_kv_heads=heads, head_dim=head_dim, value_head_dim=value, causal=True
    )
    ops: list[Op] = []
    if query_rank:
        ops.append(Matmul(name="attention.query_down", in_features=dim, out_features=query_rank))
        ops.append(Norm(name="attention.query_norm", width=query_rank))
    source = query_rank or dim
    name = "attention.query_up" if query_rank else "attention.query"
    ops += [
        Matmul(name=name, in_features=source, out_features=heads * head_dim, tensor_split="columns"),
        Matmul(name="attention.kv_down", in_features=dim, out_features=kv_rank + turned),
        Norm(name="attention.kv_norm", width=kv_rank),
        Matmul(
            name="attention.kv_up", in_features=kv_rank, out_features=heads * (plain + value), tensor_split="columns"
        ),
        Rope(name="attention.rope", num_heads=heads + 1, head_dim=turned),
    ]
    return core, ops


def _ffn_ops(row: RunRow, name: str, dim: int, ffn_dim: int) -> tuple[Op, ...]:
    is_gated = row.text("mlp_type", "swiglu").lower() in _GATED
    parts = ("gate", "up") if is_gated else ("up",)
    return (
        *(
            Matmul(name=f"{name}.{part}", in_features=dim, out_features=ffn_dim, tensor_split="columns")
            for part in parts
        ),
        Elementwise(
            name=f"{name}.activation", reads_per_token=len(parts) * ffn_dim, writes_per_token=ffn_dim, keeps_inputs=True
        ),
        Matmul(name=f"{name}.down", in_features=ffn_dim, out_features=dim, tensor_split="rows"),
    )


def _dense_ffn(row: RunRow, dim: int) -> tuple[Op, ...]:
    return (
        Norm(name="ffn_norm", width=dim),
        *_ffn_ops(row, "ffn", dim, row.count("ffn_hidden") or 4 * dim),
        Elementwise(name="ffn_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _moe_ffn(row: RunRow, dim: int, assumed: list[str]) -> tuple[Op, ...]:
    num_experts, chosen = row.required("moe_experts"), row.required("moe_topk")
    ffn_dim = row.size("moe_ffn") or row.required("ffn_hidden")
    if "moe_ffn" not in row.architecture:
        assumed.append(f"moe_ffn={ffn_dim}")
    is_gated = row.text("mlp_type", "swiglu").lower() in _GATED

    def experts(part: str, in_features: int, out_features: int) -> GroupedMatmul:
        return GroupedMatmul(
            name=f"ffn.experts.{part}",
            num_experts=num_experts,
            experts_per_token=chosen,
            in_features=in_features,
            out_features=out_features,
        )

    def elementwise(name: str, reads: int, writes: int, *, keeps_inputs: bool = False) -> Elementwise:
        return Elementwise(name=name, reads_per_token=reads, writes_per_token=writes, keeps_inputs=keeps_inputs)

    shared_dim = row.size("shared_experts") * ffn_dim
    parts = ("gate", "up") if is_gated else ("up",)
    # gpt-oss adds biases and clamps, scales and shifts what it gates, an operator each: 12 accesses of ffn_dim.
    biased = (6,) if row.architecture.get("expert_biases") else ()
    return (
        Norm(name="ffn_norm", width=dim),
        Matmul(name="ffn.router", in_features=dim, out_features=num_experts),
        elementwise("ffn.to_rows", chosen * dim, chosen * dim),
        *(experts(part, dim, ffn_dim) for part in parts),
        elementwise("ffn.experts.activation", len(parts) * chosen * ffn_dim, chosen * ffn_dim, keeps_inputs=True),
        experts("down", ffn_dim, dim),
        *(elementwise("ffn.experts.bias", n * chosen * ffn_dim, n * chosen * ffn_dim) for n in biased),
        elementwise("ffn.from_rows", chosen * dim, chosen * dim),
        elementwise("ffn.mix", chosen * dim, dim, keeps_inputs=True),
        *(_ffn_ops(row, "ffn.shared", dim, shared_dim) if shared_dim else ()),
        elementwise("ffn_residual", (3 if shared_dim else 2) * dim, dim),
    )
