"""Causal attention without its projections, and the KV cache.

CausalAttention is a module of its own so that context parallelism can replace it.

Shapes: B batch, S queries or new positions, T keys or positions so far, M maximum positions, N query heads, K key/value
heads, H width of a query or key head, W of a value head.
"""

import torch
from torch import Tensor, nn

from meshwright.models.dot_product import attend, causal_mask, same_document, with_sink_scores
from meshwright.models.sliding_window import attend_in_chunks


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
            mask = causal_mask(num_new, num_all, query_BSNH.device) & same_document(documents_BS, documents_BS)
        elif num_new < num_all and (num_new > 1 or self.window is not None):
            mask = causal_mask(num_new, num_all, query_BSNH.device, self.window)
        return attend(query_BSNH, key_BTKH, value_BTKW, mask, scale)


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
