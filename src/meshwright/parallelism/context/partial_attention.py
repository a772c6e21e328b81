"""Attention of some queries to some of their keys, and how such parts add up to the whole softmax.

A part is its own softmax and the logsumexp of its scores. Two parts of the same queries merge by these: each weighs as
much as its exponentials have in the sum of both. Given the whole's logsumexp, each part's gradient can be had alone.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H width of a query or key head, W of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallelism.context.row_attention import attend_by_rows, attend_by_rows_backward
from meshwright.parallelism.torch_private.torch_attention import (
    Attended,
    Heads,
    flash_attention,
    flash_attention_backward,
    has_flash_kernel,
)


@dataclass(frozen=True)
class Pair:
    """Queries, and the keys that they may see: all, up to their own (causal), those of their document, or both."""

    heads: Heads
    scale: float
    is_causal: bool
    documents: tuple[Tensor, Tensor] | None = None
    """documents_BS of the queries and documents_BT of the keys."""

    def attend(self) -> Attended:
        """Return attended_BSNW and logsumexp_BSN; a query that sees no key gets 0 and minus infinity."""
        if self._has_kernel:
            return flash_attention(self.heads, self.is_causal, self.scale)
        return attend_by_rows(self.heads, self.documents, self.is_causal, self.scale)

    def backward(self, gradient_BSNW: Tensor, whole: Attended) -> Heads:
        """Return this part's gradients of query, key and value; `whole` is what its queries got from all their keys."""
        if self._has_kernel:
            return flash_attention_backward(gradient_BSNW, self.heads, whole, self.is_causal, self.scale)
        return attend_by_rows_backward(gradient_BSNW, self.heads, whole, self.documents, self.is_causal, self.scale)

    @property
    def _has_kernel(self) -> bool:
        return self.documents is None and has_flash_kernel(self.heads, self.is_causal)


def merge_into(whole: Attended, part: Attended) -> None:
    """Add to `whole`, in place, what the same queries get from the other keys of `part`.

    `whole` is in float32 at least and has seen a key with each query; `part` need not have.
    """
    attended_BSNW, logsumexp_BSN = whole
    both_BSN = torch.logaddexp(logsumexp_BSN, part[1])
    of_whole_BSN1, of_part_BSN1 = ((of_one_BSN - both_BSN).exp()[..., None] for of_one_BSN in (logsumexp_BSN, part[1]))
    attended_BSNW.mul_(of_whole_BSN1).addcmul_(part[0], of_part_BSN1)
    logsumexp_BSN.copy_(both_BSN)
