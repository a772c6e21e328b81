"""CausalAttention by torch's varlen_attn: flash attention of sequences of different lengths, here documents, in a row.

A window is the kernel's own. CUDA only, in 16 bits; values are as wide as keys.

Shapes: B batch, S positions of the whole sequence, P = B S, D documents of the batch, N query heads, K key/value heads,
H width of a head.
"""

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.models.attention.sparse_backend import SparseAttention


class VarlenAttention(SparseAttention):
    """CausalAttention by varlen_attn.

    Where documents end is data: the host reads their number once a microbatch.
    """

    backend = "varlen"

    def _attend_whole(self, heads: tuple[Tensor, Tensor, Tensor], documents_BS: Tensor | None) -> Tensor:
        return varlen_attend(heads, document_starts(documents_BS, heads[0]), self.window, self.scale)


def varlen_attend(
    heads: tuple[Tensor, Tensor, Tensor], starts: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Return attended_BSNH of query_BSNH, key_BSKH and value_BSKH; `starts` as document_starts returns them."""
    query, length = heads[0], heads[0].shape[1]
    query_PNH, key_PKH, value_PKH = (x.flatten(0, 1) for x in heads)
    is_grouped = query_PNH.shape[1] != key_PKH.shape[1]
    if is_grouped and not _takes_groups():
        repeats = query_PNH.shape[1] // key_PKH.shape[1]
        key_PKH, value_PKH = (x.repeat_interleave(repeats, dim=1) for x in (key_PKH, value_PKH))
    grouped: dict[str, Any] = {"enable_gqa": is_grouped} if _takes_groups() else {}
    attended_PNH = varlen.varlen_attn(
        query_PNH,
        key_PKH,
        value_PKH,
        starts,
        starts,
        length,
        length,
        scale=scale,
        # Keys before and after the query's own; -1 is all.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(attended_PNH, Tensor)
    attended_BSNH: Tensor = attended_PNH.unflatten(0, (query.shape[0], length))
    return attended_BSNH


_starts = WeakIdKeyDictionary()
"""By the tensor of documents, which all layers of a microbatch share."""


def document_starts(documents_BS: Tensor | None, like_BS: Tensor) -> Tensor:
    """Return the first position of each document in the batch in a row, and the last one's end: D + 1, int32."""
    batch_size, length = like_BS.shape[:2]
    if documents_BS is None:
        return torch.arange(0, (batch_size + 1) * length, length, dtype=torch.int32, device=like_BS.device)
    if documents_BS not in _starts:
        is_first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
        is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        ends = torch.tensor([batch_size * length], device=like_BS.device)
        _starts[documents_BS] = torch.cat((is_first_BS.flatten().nonzero()[:, 0], ends)).int()
    starts: Tensor = _starts[documents_BS]
    return starts


@lru_cache
def _takes_groups() -> bool:
    """Return whether varlen_attn has an argument for fewer key than query heads, as torch 2.11 has not."""
    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
