"""Causal attention without its projections, the KV cache, and rotary position embedding (rotate-half convention).

CausalAttention is a module of its own so that context parallelism can replace it.

Shapes: B batch, S queries or new positions, T keys or positions so far, M maximum positions, N query heads, K key/value
heads, H width of a query or key head, W of a value head.

Rotary position embedding in the rotate-half convention: dimensions i and i + H/2 form a pair.
Hugging Face uses it for Llama and Qwen3, so their weights need no permutation.

Shapes: B batch, S positions, N heads, H head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.spec.model.architecture import LlamaArchitecture, RopeScaling


class CausalAttention(nn.Module):
    """Causal grouped-query attention, within documents if given."""

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
    """Return keys and values with the heads that fused kernels support: repeated to the queries' heads in float32.

    On accelerators flash attention, with grouped queries, is 16-bit only, and memory-efficient attention supports
    grouped queries from torch 2.14; otherwise the unfused fallback would save all scores.
    """
    repeats = query_BSNH.shape[2] // key_BTKH.shape[2]
    if repeats == 1 or query_BSNH.device.type == "cpu" or query_BSNH.dtype != torch.float32:
        return key_BTKH, value_BTKW
    return key_BTKH.repeat_interleave(repeats, dim=2), value_BTKW.repeat_interleave(repeats, dim=2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return mask_ST, True where a query attends to a key; the queries are the last positions."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


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


Rope = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(architecture, positions_S) -> (cos_SH, sin_SH)."""


def rope_tables(architecture: LlamaArchitecture, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos_SH, sin_SH) in float32: the rotation of each pair of dimensions at each of `positions_S`."""
    frequencies = rope_frequencies(architecture, positions_S.device)
    if architecture.rope_scaling is not None:
        frequencies = _stretched(frequencies, architecture.rope_scaling)
    return turns(frequencies, positions_S)


def rope_frequencies(architecture: LlamaArchitecture, device: torch.device) -> Tensor:
    """Return the frequency of each of the H / 2 pairs, in radians per position, before scaling."""
    # float32, since published weights were trained with these angles.
    exponents = torch.arange(0, architecture.rope_dim, 2, device=device).float() / architecture.rope_dim
    return 1.0 / architecture.rope_theta**exponents


def turns(frequencies: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos_SH, sin_SH) of the angles at `positions_S`."""
    angles_SH = torch.outer(positions_S.float(), torch.cat((frequencies, frequencies)))
    return angles_SH.cos(), angles_SH.sin()


def rotate(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Return x_BSNH rotated by its positions, in its own dtype; computed in float32 at least."""
    cos_S1H, sin_S1H = cos_SH[:, None], sin_SH[:, None]
    wide_BSNH = at_least_float32(x_BSNH)
    first, second = wide_BSNH.chunk(2, dim=-1)
    turned_BSNH = torch.cat((-second, first), dim=-1)
    return (wide_BSNH * cos_S1H + turned_BSNH * sin_S1H).type_as(x_BSNH)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if wider (float64 proofs)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3.1: long wavelengths are stretched by factor, short ones kept, and between the two bounds the frequency is
    # blended linearly in the number of turns that fit in the original length. Source: rope_type "llama3" of
    # transformers 5.23 (modeling_rope_utils.py).
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
