"""Scaled dot-product attention by torch's fused kernels, with masks and attention sinks.

An attention sink (GPT-OSS) is a learned logit of a query head in the softmax's denominator. It becomes one more key,
before the first, whose value is 0: queries get a further element, sink / scale, which is 1 in that key and 0 in all
others. So any kernel computes it, at the cost of one key and of 8 elements per head, to which kernels are aligned.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H width of a query or key head, W of a value head,
E = H + 8 with a sink.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_SINK_WIDTH = 8
"""Elements that a sink adds to a head."""


def attend(
    query_BSNH: Tensor, key_BTKH: Tensor, value_BTKW: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Return attended_BSNW; where `mask`, which broadcasts to BNST, is None, attention is causal if S = T.

    Queries of `with_sink_scores`, wider than keys, attend to the sink too.
    """
    is_causal = mask is None and query_BSNH.shape[1] == key_BTKH.shape[1]
    if query_BSNH.shape[-1] != key_BTKH.shape[-1]:
        return _attend_with_sink(query_BSNH, key_BTKH, value_BTKW, mask, scale)
    key_BTKH, value_BTKW = with_fused_heads(query_BSNH, key_BTKH, value_BTKW)
    attended_BNSW = F.scaled_dot_product_attention(
        query_BSNH.transpose(1, 2),
        key_BTKH.transpose(1, 2),
        value_BTKW.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query_BSNH.shape[2] != key_BTKH.shape[2],
    )
    return attended_BNSW.transpose(1, 2)


def with_sink_scores(query_BSNH: Tensor, sinks_N: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return query_BSNE, whose product with the sink's key is sinks_N, and the scale, 1 / sqrt(H) for None."""
    scale = query_BSNH.shape[-1] ** -0.5 if scale is None else scale
    scores_N1 = F.pad((sinks_N / scale)[:, None], (0, _SINK_WIDTH - 1)).type_as(query_BSNH)
    return torch.cat((query_BSNH, scores_N1.expand(*query_BSNH.shape[:3], -1)), dim=-1), scale


def _attend_with_sink(
    query_BSNE: Tensor, key_BTKH: Tensor, value_BTKW: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return attended_BSNW of queries with sink scores; the sink is a key before all others."""
    width, value_width = query_BSNE.shape[-1], value_BTKW.shape[-1]
    is_causal = mask is None and query_BSNE.shape[1] == key_BTKH.shape[1]
    # Flash attention needs values as wide as keys.
    key, value = (F.pad(x, (0, width - x.shape[-1], 0, 0, 1, 0)) for x in (key_BTKH, value_BTKW))
    key[:, 0, :, key_BTKH.shape[-1]] = 1.0
    if is_causal:
        # A query before the first, which sees the sink only, so that query i sees the sink and i + 1 keys.
        query_BSNE = F.pad(query_BSNE, (0, 0, 0, 0, 1, 0))
    attended = attend(query_BSNE, key, value, None if mask is None else F.pad(mask, (1, 0), value=True), scale)
    return attended[:, int(is_causal) :, :, :value_width]


def with_fused_heads(query_BSNH: Tensor, key_BTKH: Tensor, value_BTKW: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with the heads that fused kernels support: repeated to the queries' heads in float32.

    On accelerators flash attention, with grouped queries, is 16-bit only, and memory-efficient attention supports
    grouped queries from torch 2.14; otherwise the unfused fallback would save all scores.
    """
    repeats = query_BSNH.shape[2] // key_BTKH.shape[2]
    if repeats == 1 or query_BSNH.device.type == "cpu" or query_BSNH.dtype != torch.float32:
        return key_BTKH, value_BTKW
    return key_BTKH.repeat_interleave(repeats, dim=2), value_BTKW.repeat_interleave(repeats, dim=2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return mask_ST, True where a query attends to a key; the queries are the last positions."""
    mask_ST = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask_ST if window is None else mask_ST.triu(num_keys - num_queries - window + 1)


def same_document(query_documents_BS: Tensor, key_documents_BT: Tensor) -> Tensor:
    """Return mask_B1ST, True where query and key are of the same document."""
    return (query_documents_BS[:, :, None] == key_documents_BT[:, None, :])[:, None]
