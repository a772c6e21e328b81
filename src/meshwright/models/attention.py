"""CausalAttention: softmax attention without its projections; and KVCache, so that generation computes each key once.

CausalAttention is a module of its own so that it can be replaced whole: context parallelism puts another in its place,
which computes the same from a part of the sequence.

Shapes: B batch, S queries or new positions, T keys or positions so far, M positions at most, N query heads, K key/value
heads, H width of a query or key head, W of a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Grouped-query attention to what is not after the query, and of its own document where documents are given."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        """Factor on the scores; None is 1 / sqrt(H)."""

    def forward(
        self, query_BSNH: Tensor, key_BTKH: Tensor, value_BTKW: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return attended_BSNW; the S queries are the last S of the T positions."""
        num_new, num_all = query_BSNH.shape[1], key_BTKH.shape[1]
        mask = None
        if documents_BS is not None:
            mask = causal_mask(num_new, num_all, query_BSNH.device) & same_document(documents_BS, documents_BS)
        elif 1 < num_new < num_all:
            mask = causal_mask(num_new, num_all, query_BSNH.device)
        key_BTKH, value_BTKW = with_fused_heads(query_BSNH, key_BTKH, value_BTKW)
        attended_BNSW = F.scaled_dot_product_attention(
            query_BSNH.transpose(1, 2),
            key_BTKH.transpose(1, 2),
            value_BTKW.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and num_new == num_all,
            scale=self.scale,
            enable_gqa=query_BSNH.shape[2] != key_BTKH.shape[2],
        )
        return attended_BNSW.transpose(1, 2)


def with_fused_heads(query_BSNH: Tensor, key_BTKH: Tensor, value_BTKW: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as a fused kernel asks for: of accelerators in 32 bits, the queries'.

    Flash attention, which shares the heads of keys, has 16 bits only, and memory-efficient attention learned to share
    them in torch 2.14: before, all scores of all heads were kept.
    """
    repeats = query_BSNH.shape[2] // key_BTKH.shape[2]
    if repeats == 1 or query_BSNH.device.type == "cpu" or query_BSNH.dtype != torch.float32:
        return key_BTKH, value_BTKW
    return key_BTKH.repeat_interleave(repeats, dim=2), value_BTKW.repeat_interleave(repeats, dim=2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return mask_ST: whether each query may see each key; the queries are the last of the positions."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def same_document(query_documents_BS: Tensor, key_documents_BT: Tensor) -> Tensor:
    """Return mask_B1ST: whether query and key are of one document."""
    return (query_documents_BS[:, :, None] == key_documents_BT[:, None, :])[:, None]


class LayerCache:
    """Keys and values of one attention, in memory allocated once, at the first append."""

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
            # Sized by what arrives: the batch, and the key heads, which may be this rank's share of them.
            batch_size = key_BSKH.shape[0]
            self._key_BMKH = key_BSKH.new_empty(batch_size, self._max_len, *key_BSKH.shape[2:])
            self._value_BMKH = value_BSKH.new_empty(batch_size, self._max_len, *value_BSKH.shape[2:])
        self._key_BMKH[:, start : self.length] = key_BSKH
        self._value_BMKH[:, start : self.length] = value_BSKH
        return self._key_BMKH[:, : self.length], self._value_BMKH[:, : self.length]


class KVCache:
    """One LayerCache for each transformer block, for at most `max_len` positions (prompt and new tokens together)."""

    def __init__(self, num_layers: int, max_len: int) -> None:
        self.layers = [LayerCache(max_len) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Return how many positions are held: also the position of the next token."""
        return self.layers[0].length


def next_positions(inputs: Tensor, cache: KVCache | None) -> Tensor:
    """Return positions_S of `inputs` [B, S, ...]: 0, 1, ... or on from where `cache` ends."""
    start = 0 if cache is None else cache.length
    return torch.arange(start, start + inputs.shape[1], device=inputs.device)
