"""CausalAttention by FlexAttention, which skips blocks of scores that documents or a window hide.

torch has no backward of FlexAttention on a CPU (2.13: eager, aot_eager and Inductor alike). There the same mask
function is written out, and scaled_dot_product_attention computes every score under it.

Shapes: B batch, S positions of the whole sequence, N query heads, K key/value heads, H width of a query or key head, W
of a value head.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.models.attention.causal_attention import attend
from meshwright.models.attention.sparse_backend import SparseAttention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query and key position: whether the query attends to the key."""


class FlexAttention(SparseAttention):
    """CausalAttention by FlexAttention.

    It is compiled by itself: a compiled block could not keep the block mask from layer to layer.
    """

    backend = "flex"

    def _attend_whole(self, heads: tuple[Tensor, Tensor, Tensor], documents_BS: Tensor | None) -> Tensor:
        batch_size, length = heads[0].shape[:2]
        if heads[0].device.type == "cpu":
            return attend(*heads, written_out(documents_BS, self.window, batch_size, length), self.scale)
        return flex_attend(heads, block_mask(documents_BS, self.window, length, heads[0].device), self.scale)


def flex_attend(heads: tuple[Tensor, Tensor, Tensor], mask: Any, scale: float | None) -> Tensor:
    """Return attended_BSNW of query_BSNH, key_BSKH and value_BSKW under a block mask."""
    query, key, value = (x.transpose(1, 2) for x in heads)
    is_grouped = query.shape[1] != key.shape[1]
    attended: Tensor = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return attended.transpose(1, 2)


@lru_cache
def _compiled() -> Callable[..., Any]:
    # Uncompiled it holds all scores.
    return torch.compile(flex.flex_attention)


@lru_cache
def _compiled_mask() -> Callable[..., Any]:
    return torch.compile(flex.create_block_mask)


def mask_mod(documents_BS: Tensor | None, window: int | None) -> MaskMod:
    """Return the mask function: causal, within `window` positions and within documents, where given."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mask = query >= key
        if window is not None:
            mask = mask & (query - key < window)
        return mask if documents_BS is None else mask & (documents_BS[batch, query] == documents_BS[batch, key])

    return visible


def written_out(documents_BS: Tensor | None, window: int | None, batch_size: int, length: int) -> Tensor | None:
    """Return the mask function's values [B or 1, 1, S, S] on a CPU; None where SDPA's own causal mask is the same."""
    if documents_BS is None and (window is None or window >= length):
        return None
    num_masks = 1 if documents_BS is None else batch_size
    return flex.create_mask(mask_mod(documents_BS, window), num_masks, 1, length, length, device="cpu")


_of_documents = WeakIdKeyDictionary()
"""Block masks by the tensor of documents, which all layers of a microbatch share, then by window."""


def block_mask(documents_BS: Tensor | None, window: int | None, length: int, device: torch.device) -> Any:
    """Return the BlockMask of a whole sequence: which blocks of 128 x 128 scores are computed, and which masked."""
    if documents_BS is None:
        return _causal_block_mask(window, length, device)
    masks: dict[int | None, Any] = _of_documents.setdefault(documents_BS, {})
    if window not in masks:
        # Of an alias: a mask that held the tensor itself would keep it alive, and so its own entry.
        mod = mask_mod(documents_BS.detach(), window)
        masks[window] = _compiled_mask()(mod, documents_BS.shape[0], None, length, length, device=device)
    return masks[window]


@lru_cache
def _causal_block_mask(window: int | None, length: int, device: torch.device) -> Any:
    return _compiled_mask()(mask_mod(None, window), None, None, length, length, device=device)
