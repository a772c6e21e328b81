"""Attention of some queries to some of their keys, and how such parts add up to the whole softmax.

A part is its own softmax and the logsumexp of its scores. Two parts of the same queries merge by these: each weighs as
much as its exponentials have in the sum of both. Given the whole's logsumexp, each part's gradient can be had alone.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, G = N / K, R = G S, H width of a query or key
head, W of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.models.attention import same_document
from meshwright.models.rope import at_least_float32
from meshwright.parallelism.torch_attention import (
    Attended,
    Heads,
    flash_attention,
    flash_attention_backward,
    has_flash_kernel,
)

_MAX_SCORES = 2**24
"""Scores held at once where no kernel hides them: 64 MiB in float32."""


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
        parts = [self._attend_rows(rows) for rows in self._row_blocks()]
        attended, logsumexp = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return attended, logsumexp

    def backward(self, gradient_BSNW: Tensor, whole: Attended) -> Heads:
        """Return this part's gradients of query, key and value; `whole` is what its queries got from all their keys."""
        if self._has_kernel:
            return flash_attention_backward(gradient_BSNW, self.heads, whole, self.is_causal, self.scale)
        query_gradients = []
        key_gradient, value_gradient = (torch.zeros_like(at_least_float32(x)) for x in self.heads[1:])
        for rows in self._row_blocks():
            attended_BSNW, logsumexp_BSN = (x[:, rows] for x in whole)
            of_query, of_key, of_value = self._rows_backward(rows, gradient_BSNW[:, rows], attended_BSNW, logsumexp_BSN)
            query_gradients.append(of_query)
            key_gradient += of_key
            value_gradient += of_value
        return torch.cat(query_gradients, dim=1), key_gradient, value_gradient

    @property
    def _has_kernel(self) -> bool:
        return self.documents is None and has_flash_kernel(self.heads, self.is_causal)

    def _row_blocks(self) -> list[slice]:
        """Return the queries in blocks whose scores can be held at once."""
        batch_size, num_queries, num_heads, _ = self.heads[0].shape
        num_rows = max(1, _MAX_SCORES // (batch_size * num_heads * self.heads[1].shape[1]))
        return [slice(start, min(start + num_rows, num_queries)) for start in range(0, num_queries, num_rows)]

    def _scores_BKRT(self, rows: slice) -> Tensor:
        """Return the scaled scores, minus infinity where the key may not be seen."""
        query_BSNH, key_BTKH, _ = self.heads
        query_BKRH = _by_key_head(at_least_float32(query_BSNH[:, rows]), key_BTKH.shape[2])
        scores_BKRT = query_BKRH @ at_least_float32(key_BTKH).permute(0, 2, 3, 1) * self.scale
        hidden_B1ST = self._hidden_B1ST(rows, key_BTKH.shape[1])
        if hidden_B1ST is None:
            return scores_BKRT
        scores_BKGST: Tensor = scores_BKRT.unflatten(2, (-1, rows.stop - rows.start))
        return scores_BKGST.masked_fill(hidden_B1ST[:, :, None], -torch.inf).flatten(2, 3)

    def _hidden_B1ST(self, rows: slice, num_keys: int) -> Tensor | None:
        positions_T = torch.arange(num_keys, device=self.heads[0].device)
        later_ST = positions_T > positions_T[rows, None] if self.is_causal else None
        if self.documents is None:
            return None if later_ST is None else later_ST[None, None]
        foreign_B1ST = ~same_document(self.documents[0][:, rows], self.documents[1])
        return foreign_B1ST if later_ST is None else foreign_B1ST | later_ST

    def _attend_rows(self, rows: slice) -> Attended:
        value_BKTW = at_least_float32(self.heads[2]).transpose(1, 2)
        scores_BKRT = self._scores_BKRT(rows)
        logsumexp_BKR1 = scores_BKRT.logsumexp(-1, keepdim=True)
        # Nothing is seen where it is minus infinity, and the difference of two of these is no number.
        weights_BKRT = (scores_BKRT - logsumexp_BKR1.masked_fill(logsumexp_BKR1 == -torch.inf, 0.0)).exp()
        num_queries = rows.stop - rows.start
        return _by_query(weights_BKRT @ value_BKTW, num_queries), _by_query(logsumexp_BKR1, num_queries)[..., 0]

    def _rows_backward(self, rows: slice, gradient_BSNW: Tensor, attended_BSNW: Tensor, logsumexp_BSN: Tensor) -> Heads:
        query_BSNH, key_BTKH, value_BTKW = (at_least_float32(x) for x in self.heads)
        num_kv_heads, num_queries = key_BTKH.shape[2], rows.stop - rows.start
        gradient_BSNW = at_least_float32(gradient_BSNW)
        inner_BSN1 = (gradient_BSNW * attended_BSNW).sum(-1, keepdim=True)
        gradient_BKRW, inner_BKR1, logsumexp_BKR1, query_BKRH = (
            _by_key_head(x, num_kv_heads)
            for x in (gradient_BSNW, inner_BSN1, logsumexp_BSN[..., None], query_BSNH[:, rows])
        )
        weights_BKRT = (self._scores_BKRT(rows) - logsumexp_BKR1).exp()
        of_value_BKTW = weights_BKRT.mT @ gradient_BKRW
        of_scores_BKRT = weights_BKRT * (gradient_BKRW @ value_BTKW.permute(0, 2, 3, 1) - inner_BKR1) * self.scale
        of_query_BSNH = _by_query(of_scores_BKRT @ key_BTKH.transpose(1, 2), num_queries)
        of_key_BKTH = of_scores_BKRT.mT @ query_BKRH
        return of_query_BSNH, of_key_BKTH.transpose(1, 2), of_value_BKTW.transpose(1, 2)


def merge_into(whole: Attended, part: Attended) -> None:
    """Add to `whole`, in place, what the same queries get from the other keys of `part`.

    `whole` is in float32 at least and has seen a key with each query; `part` need not have.
    """
    attended_BSNW, logsumexp_BSN = whole
    both_BSN = torch.logaddexp(logsumexp_BSN, part[1])
    of_whole_BSN1, of_part_BSN1 = ((of_one_BSN - both_BSN).exp()[..., None] for of_one_BSN in (logsumexp_BSN, part[1]))
    attended_BSNW.mul_(of_whole_BSN1).addcmul_(part[0], of_part_BSN1)
    logsumexp_BSN.copy_(both_BSN)


def _by_key_head(x_BSNE: Tensor, num_kv_heads: int) -> Tensor:
    """Return x_BKRE: the rows of all queries and heads that look at one key head, heads first."""
    x_BSKGE: Tensor = x_BSNE.unflatten(2, (num_kv_heads, -1))
    return x_BSKGE.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_query(x_BKRE: Tensor, num_queries: int) -> Tensor:
    """Return x_BSNE, undoing `_by_key_head`."""
    x_BKGSE: Tensor = x_BKRE.unflatten(2, (-1, num_queries))
    return x_BKGSE.permute(0, 3, 1, 2, 4).flatten(2, 3)
