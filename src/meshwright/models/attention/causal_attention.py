"""Causal attention without its projections, with sliding windows and attention sinks, and the KV cache.

CausalAttention is a module of its own so that context parallelism can replace it, and so that another backend can:
sdpa_attention.py, flex_attention.py, varlen_attention.py.

An attention sink (GPT-OSS) is a learned logit of a query head in the softmax's denominator. It becomes one more key,
before the first, whose value is 0: queries get a further element, sink / scale, which is 1 in that key and 0 in all
others. So any kernel computes it, at the cost of one key and of 8 elements per head, to which kernels are aligned.

A sliding window is computed in chunks of its size, each with the keys of its own chunk and of the one before: time and
memory are linear in the sequence. Query heads that share a key head are rows of one chunk, so that kernels with a mask
need no grouped queries.

Shapes: B batch, S queries or new positions, T keys or positions so far, M maximum positions, N query heads, K key/value
heads, H width of a query or key head, W of a value head, E = H + 8 with a sink. Of windows: C chunks, P positions of a
chunk, L = 2 P keys of a chunk, X = B C, G = N / K, R = G P rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SINK_WIDTH = 8
"""Elements that a sink adds to a head."""


class CausalAttention(nn.Module):
    """Causal grouped-query attention, within documents, a sliding window and with attention sinks if given."""

    def __init__(self, scale: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.scale = scale
        """Factor on the scores; None is 1 / sqrt(H)."""
        self.window = window
        """Positions that a query attends to, its own included; None for all."""

    def forward(
        self,
        query_BSNH: Tensor,
        key_BTKH: Tensor,
        value_BTKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attended_BSNW; the S queries are the last S of the T positions, `sinks_N` logits without a value."""
        num_new, num_all, scale = query_BSNH.shape[1], key_BTKH.shape[1], self.scale
        if sinks_N is not None:
            query_BSNH, scale = with_sink_scores(query_BSNH, sinks_N, scale)
        if self.window is not None and num_new == num_all > self.window:
            return attend_in_chunks(query_BSNH, key_BTKH, value_BTKW, self.window, documents_BS, scale)
        mask = None
        if documents_BS is not None:
            mask = causal_mask(num_new, num_all, query_BSNH.device, self.window)
            mask = mask & same_document(documents_BS, documents_BS)
        elif num_new < num_all and (num_new > 1 or self.window is not None):
            mask = causal_mask(num_new, num_all, query_BSNH.device, self.window)
        return attend(query_BSNH, key_BTKH, value_BTKW, mask, scale)


class AttentionSinks(nn.Module):
    """A learned logit in the softmax's denominator of each query head; a module of its own, to be sharded by head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return sinks_N."""
        return self.weight


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


def attend_in_chunks(
    query_BSNE: Tensor,
    key_BSKE: Tensor,
    value_BSKE: Tensor,
    window: int,
    documents_BS: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attended_BSNE: each query attends to the last `window` positions of its document, its own included."""
    batch, length, num_heads, _ = query_BSNE.shape
    num_kv_heads, num_chunks = key_BSKE.shape[2], -(-length // window)
    query_BCPKGE = _padded(query_BSNE, window, num_chunks, 0).unflatten(3, (num_kv_heads, -1))
    query_XRKE = query_BCPKGE.movedim(4, 2).flatten(2, 3).flatten(0, 1)
    key_XLKE, value_XLKE = (
        _with_previous(_padded(x, window, num_chunks, 1)).flatten(0, 1) for x in (key_BSKE, value_BSKE)
    )
    mask_BC1PL = _mask(query_BSNE, window, num_chunks, documents_BS)
    num_groups = num_heads // num_kv_heads
    mask_X1RL = mask_BC1PL.expand(batch, -1, -1, -1, -1).flatten(0, 1).repeat(1, 1, num_groups, 1)
    attended_XRKE = attend(query_XRKE, key_XLKE, value_XLKE, mask_X1RL, scale)
    attended_BCGPKE = attended_XRKE.unflatten(0, (batch, num_chunks)).unflatten(2, (num_groups, window))
    attended_BSNE: Tensor = attended_BCGPKE.movedim(2, 4).flatten(1, 2).flatten(2, 3)[:, :length]
    return attended_BSNE


def _padded(x: Tensor, window: int, num_chunks: int, num_before: int) -> Tensor:
    """Return [B, C + num_before, P, ...] of x [B, S, ...], with chunks of zeros before and zeros up to the last."""
    around = [0, 0] * (x.dim() - 2) + [num_before * window, num_chunks * window - x.shape[1]]
    chunks: Tensor = F.pad(x, around).unflatten(1, (num_chunks + num_before, window))
    return chunks


def _with_previous(chunks: Tensor) -> Tensor:
    """Return each chunk but the first after the one before it: [B, C, L, ...] of [B, C + 1, P, ...]."""
    return torch.cat((chunks[:, :-1], chunks[:, 1:]), dim=2)


def _mask(query_BSNE: Tensor, window: int, num_chunks: int, documents_BS: Tensor | None) -> Tensor:
    """Return mask_BC1PL, True where a query attends to a key; B is 1 without documents."""
    mask_PL = causal_mask(window, 2 * window, query_BSNE.device, window)
    # The keys before the first chunk are no positions.
    is_key_CL = torch.ones(num_chunks, 2 * window, dtype=torch.bool, device=query_BSNE.device)
    is_key_CL[0, :window] = False
    mask_BC1PL = (mask_PL & is_key_CL[:, None])[None, :, None]
    if documents_BS is None:
        return mask_BC1PL
    queries = _padded(documents_BS, window, num_chunks, 0).flatten(0, 1)
    keys = _with_previous(_padded(documents_BS, window, num_chunks, 1)).flatten(0, 1)
    is_same_BC1PL: Tensor = same_document(queries, keys).unflatten(0, (-1, num_chunks))
    return mask_BC1PL & is_same_BC1PL


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


class LayerCache:
    """Keys and values of one layer, in memory allocated at the first append."""

    def __init__(self, max_len: int) -> None:
        self.length = 0
        self._max_len = max_len
        self._key_BMKH: Tensor | None = None
        self._value_BMKH: Tensor | None = None

    def append(self, key_BSKH: Tensor, value_BSKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (key_BTKH, value_BTKH): all positions so far, the new ones last."""
        start, self.length = self.length, self.length + key_BSKH.shape[1]
        assert self.length <= self._max_len, f"{self.length} positions in a KVCache of {self._max_len}"
        if self._key_BMKH is None or self._value_BMKH is None:
            # Sized by the first input: the batch, and the key heads, possibly this rank's shard.
            self._key_BMKH, self._value_BMKH = self._empty_like(key_BSKH), self._empty_like(value_BSKH)
        self._key_BMKH[:, start : self.length] = key_BSKH
        self._value_BMKH[:, start : self.length] = value_BSKH
        return self._key_BMKH[:, : self.length], self._value_BMKH[:, : self.length]

    def _empty_like(self, first_BSKX: Tensor) -> Tensor:
        try:
            return first_BSKX.new_empty(first_BSKX.shape[0], self._max_len, *first_BSKX.shape[2:])
        except (RuntimeError, TypeError):  # no such memory; no such size
            raise MemoryError(f"a KV cache of {self._max_len:,} positions does not fit into memory") from None


class KVCache:
    """One LayerCache per transformer block, for at most `max_len` positions of prompt and new tokens."""

    def __init__(self, num_layers: int, max_len: int) -> None:
        self.layers = [LayerCache(max_len) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Return the number of positions held, which is the position of the next token."""
        return self.layers[0].length


def next_positions(inputs: Tensor, cache: KVCache | None) -> Tensor:
    """Return positions_S of `inputs` [B, S, ...]: 0, 1, ... or from the length of `cache` on."""
    start = 0 if cache is None else cache.length
    return torch.arange(start, start + inputs.shape[1], device=inputs.device)
