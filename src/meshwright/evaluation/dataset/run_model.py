"""model_of: the model of a published run, op by op, from the shape columns of its row."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.model.model_spec import ModelSpec, transformer_spec
from meshwright.spec.model.moe_architecture import LatentAttention
from meshwright.spec.model.transformer_config import (
    AttentionConfig,
    BlocksConfig,
    MLPConfig,
    MoEConfig,
    TransformerConfig,
)

_GENERIC_VOCABULARY = 50_304
"""GPT-2's, padded to a multiple of 128."""
_GATED = ("swiglu", "geglu")


def model_of(row: RunRow, assumed: list[str]) -> ModelSpec:
    """Return the row's model, noting in `assumed` what its columns do not say; raises UnsupportedError."""
    dim, num_layers = row.required("hidden"), row.required("n_layers")
    config = TransformerConfig(
        vocab_size=row.count_or("vocab", _GENERIC_VOCABULARY, assumed),
        dim=dim,
        blocks=tuple(_blocks(row, dim, num_layers, assumed)),
        num_positions=(row.count("seq_len") or 2048) if _learns_positions(row) else None,
        tie_embeddings=bool(row.architecture.get("tied_embed", False)),
        predicts_second_token=_has_prediction_module(row, []),
    )
    return transformer_spec(config)


def _learns_positions(row: RunRow) -> bool:
    return row.architecture.get("pos") == "learned"


def _blocks(row: RunRow, dim: int, num_layers: int, assumed: list[str]) -> Iterator[BlocksConfig]:
    """Yield each kind of block with its number: full and windowed attention, dense and mixture of experts."""
    num_experts = row.count("moe_experts") or 0
    num_dense = num_layers if not num_experts else min(row.size("first_dense"), num_layers)
    if num_experts and num_dense and num_dense >= num_layers - 1:
        num_dense = 1  # A model cut to a few layers keeps one dense one.
    # A multi-token prediction module is one more block (DeepSeek-V3).
    extra = int(_has_prediction_module(row, assumed))
    kinds: list[tuple[int, MLPConfig | MoEConfig]] = [(num_dense, _mlp(row, row.count("ffn_hidden") or 4 * dim))]
    if num_experts:
        kinds.append((num_layers - num_dense + extra, _moe(row, assumed)))
    attention = _attention(row, dim, assumed)
    window, period = row.size("sliding_window"), max(1, row.size("swa_alternate"))
    for count, ffn in kinds:
        windowed = count // period if window else 0
        # Latent attention has no window.
        yield BlocksConfig(windowed, replace(attention, window=None if attention.latent else window or None), ffn)
        yield BlocksConfig(count - windowed, attention, ffn)


def _has_prediction_module(row: RunRow, assumed: list[str]) -> bool:
    if row.count("mtp_modules") is None and "mtp_modules" not in row.assume:
        return False
    return row.count_or("mtp_modules", 1, assumed) > 0


def _attention(row: RunRow, dim: int, assumed: list[str]) -> AttentionConfig:
    heads = row.count("n_heads")
    if heads is None:
        heads = max(1, dim // 128)
        assumed.append(f"n_heads={heads}")
    kv_heads = row.count("n_kv_heads") or heads
    if str(row.architecture.get("attn", "")).upper() == "MLA":
        latent = _latent(row)
        return AttentionConfig(heads, heads, latent.plain_head_dim + latent.rope_head_dim, latent)
    head_dim = row.size("head_dim") or dim // heads
    return AttentionConfig(heads, kv_heads, head_dim, has_rope=not _learns_positions(row))


def _latent(row: RunRow) -> LatentAttention:
    missing = [key for key in ("kv_lora", "qk_nope", "qk_rope", "v_head") if not row.size(key)]
    if missing:
        raise UnsupportedError(f"arch_json has attn = MLA but no {', '.join(missing)}")
    return LatentAttention(
        query_rank=row.size("q_lora") or None,
        kv_rank=row.size("kv_lora"),
        plain_head_dim=row.size("qk_nope"),
        rope_head_dim=row.size("qk_rope"),
        value_head_dim=row.size("v_head"),
    )


def _mlp(row: RunRow, ffn_dim: int) -> MLPConfig:
    return MLPConfig(ffn_dim, is_gated=row.text("mlp_type", "swiglu").lower() in _GATED)


def _moe(row: RunRow, assumed: list[str]) -> MoEConfig:
    num_experts, chosen = row.required("moe_experts"), row.required("moe_topk")
    ffn_dim = row.size("moe_ffn") or row.required("ffn_hidden")
    if "moe_ffn" not in row.architecture:
        assumed.append(f"moe_ffn={ffn_dim}")
    shared_dim = row.size("shared_experts") * ffn_dim
    # gpt-oss adds biases and clamps, scales and shifts what it gates, an operator each: 12 accesses of ffn_dim.
    num_bias_passes = 6 if row.architecture.get("expert_biases") else 0
    shared = _mlp(row, shared_dim) if shared_dim else None
    return MoEConfig(num_experts, chosen, _mlp(row, ffn_dim), shared, num_bias_passes)
