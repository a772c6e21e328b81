"""Sliding-window attention in chunks: time and memory are linear in the sequence, with any attention kernel.

Queries are in C chunks of the window's size, and each chunk attends to the keys of its own chunk and of the one before:
twice the window, of which a mask leaves the window. Query heads that share a key head are rows of one chunk, so that no
kernel needs grouped queries.

Shapes: B batch, S positions, C chunks, P positions of a chunk (the window), L = 2 P keys of a chunk, N query heads, K
key/value heads, G = N / K query heads per key head, R = G P rows, E width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.dot_product import attend, causal_mask, same_document


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
