"""Attention in blocks of queries, for document masks in a ring, which no flash kernel supports.

On an accelerator forward and backward are one custom operator each: a long sequence has thousands of blocks of about
thirty kernels, which would only repeat in a trace. On CPU they stay the operators that are measured there.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, G = N / K, R = G S, H width of a query or key
head, W of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.models.attention.causal_attention import same_document
from meshwright.models.rope import at_least_float32
from meshwright.parallelism.torch_private.torch_attention import Attended, Heads
from meshwright.spec.model.op import ATTENTION_SCORES_AT_ONCE

Documents = tuple[Tensor, Tensor]
"""documents_BS of the queries and documents_BT of the keys."""


def blockwise_attention(heads: Heads, documents: Documents | None, is_causal: bool, scale: float) -> Attended:
    """Return attended_BSNW and logsumexp_BSN in float32 at least; no gradient."""
    attend = _attend if heads[0].device.type == "cpu" else _attend_as_operator
    attended, logsumexp = attend(heads, documents or (), is_causal, scale)
    return attended, logsumexp


def blockwise_attention_backward(
    gradient_BSNW: Tensor, heads: Heads, whole: Attended, documents: Documents | None, is_causal: bool, scale: float
) -> Heads:
    """Return the gradients of query, key and value in float32 at least; `whole` is the attention to all keys."""
    backward = _backward if heads[0].device.type == "cpu" else _backward_as_operator
    query, key, value = backward(heads, gradient_BSNW, whole, documents or (), is_causal, scale)
    return query, key, value


def _attend(
    heads: Sequence[Tensor], documents: Sequence[Tensor], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    blocks = _Blocks.of(heads, documents, is_causal, scale)
    parts = [blocks.attend(rows) for rows in blocks.rows()]
    attended_BSNW, logsumexp_BSN = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    return attended_BSNW, logsumexp_BSN


def _backward(
    heads: Sequence[Tensor],
    gradient_BSNW: Tensor,
    whole: Sequence[Tensor],
    documents: Sequence[Tensor],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _Blocks.of(heads, documents, is_causal, scale)
    query_gradients = []
    key_gradient, value_gradient = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in blocks.heads[1:]
    )
    for rows in blocks.rows():
        of_whole = whole[0][:, rows], whole[1][:, rows]
        of_query, of_key, of_value = blocks.backward(rows, gradient_BSNW[:, rows], *of_whole)
        query_gradients.append(of_query)
        key_gradient += of_key
        value_gradient += of_value
    return torch.cat(query_gradients, dim=1), key_gradient, value_gradient


_attend_as_operator = torch.library.custom_op("meshwright::attention_by_rows", _attend, mutates_args=())
_backward_as_operator = torch.library.custom_op("meshwright::attention_by_rows_backward", _backward, mutates_args=())


@_attend_as_operator.register_fake
def _(heads: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor]:
    query_BSNH, value_BTKW = heads[0], heads[2]
    wide = torch.promote_types(query_BSNH.dtype, torch.float32)
    attended_BSNW = query_BSNH.new_empty((*query_BSNH.shape[:3], value_BTKW.shape[3]), dtype=wide)
    return attended_BSNW, query_BSNH.new_empty(query_BSNH.shape[:3], dtype=wide)


@_backward_as_operator.register_fake
def _(heads: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(heads[0].dtype, torch.float32)
    query, key, value = (x.new_empty(x.shape, dtype=wide) for x in heads)
    return query, key, value


@dataclass(frozen=True)
class _Blocks:
    """One part of attention, computed for one block of queries at a time."""

    heads: Heads
    """In float32 at least."""
    documents: Sequence[Tensor]
    """Of queries and of keys; empty without a document mask."""
    is_causal: bool
    scale: float

    @classmethod
    def of(cls, heads: Sequence[Tensor], documents: Sequence[Tensor], is_causal: bool, scale: float) -> _Blocks:
        query, key, value = (at_least_float32(x) for x in heads)
        return cls((query, key, value), documents, is_causal, scale)

    def rows(self) -> list[slice]:
        """Return blocks of queries with at most ATTENTION_SCORES_AT_ONCE scores each."""
        batch_size, num_queries, num_heads, _ = self.heads[0].shape
        num_rows = max(1, ATTENTION_SCORES_AT_ONCE // (batch_size * num_heads * self.heads[1].shape[1]))
        return [slice(start, min(start + num_rows, num_queries)) for start in range(0, num_queries, num_rows)]

    def attend(self, rows: slice) -> Attended:
        value_BKTW = self.heads[2].transpose(1, 2)
        scores_BKRT = self._scores_BKRT(rows)
        logsumexp_BKR1 = scores_BKRT.logsumexp(-1, keepdim=True)
        # A query that sees no key has minus infinity, whose difference would be NaN.
        weights_BKRT = (scores_BKRT - logsumexp_BKR1.masked_fill(logsumexp_BKR1 == -torch.inf, 0.0)).exp()
        num_queries = rows.stop - rows.start
        return _by_query(weights_BKRT @ value_BKTW, num_queries), _by_query(logsumexp_BKR1, num_queries)[..., 0]

    def backward(self, rows: slice, gradient_BSNW: Tensor, attended_BSNW: Tensor, logsumexp_BSN: Tensor) -> Heads:
        query_BSNH, key_BTKH, value_BTKW = self.heads
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

    def _scores_BKRT(self, rows: slice) -> Tensor:
        """Return the scaled scores, minus infinity where masked."""
        query_BSNH, key_BTKH, _ = self.heads
        query_BKRH = _by_key_head(query_BSNH[:, rows], key_BTKH.shape[2])
        scores_BKRT = query_BKRH @ key_BTKH.permute(0, 2, 3, 1) * self.scale
        masked_B1ST = self._masked_B1ST(rows, key_BTKH.shape[1])
        if masked_B1ST is None:
            return scores_BKRT
        scores_BKGST: Tensor = scores_BKRT.unflatten(2, (-1, rows.stop - rows.start))
        return scores_BKGST.masked_fill(masked_B1ST[:, :, None], -torch.inf).flatten(2, 3)

    def _masked_B1ST(self, rows: slice, num_keys: int) -> Tensor | None:
        positions_T = torch.arange(num_keys, device=self.heads[0].device)
        later_ST = positions_T > positions_T[rows, None] if self.is_causal else None
        if not self.documents:
            return None if later_ST is None else later_ST[None, None]
        other_document_B1ST = ~same_document(self.documents[0][:, rows], self.documents[1])
        return other_document_B1ST if later_ST is None else other_document_B1ST | later_ST


def _by_key_head(x_BSNE: Tensor, num_kv_heads: int) -> Tensor:
    """Return x_BKRE: the queries and query heads of each key head in one dim, heads first."""
    x_BSKGE: Tensor = x_BSNE.unflatten(2, (num_kv_heads, -1))
    return x_BSKGE.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_query(x_BKRE: Tensor, num_queries: int) -> Tensor:
    """Return x_BSNE: the inverse of `_by_key_head`."""
    x_BKGSE: Tensor = x_BKRE.unflatten(2, (-1, num_queries))
    return x_BKGSE.permute(0, 3, 1, 2, 4).flatten(2, 3)
