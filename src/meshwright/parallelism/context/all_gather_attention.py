"""Context parallelism by all-gathering keys and values; each rank attends with its own queries.

Shapes: B batch, S positions of this rank, T of the whole sequence, C = S / 2 of one chunk, L keys that a chunk sees,
N query heads, K key/value heads, H width of a query or key head, W of a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from meshwright.models.attention import CausalAttention, causal_mask, same_document, with_fused_heads
from meshwright.parallelism.collectives import all_gather_autograd, all_gather_dim
from meshwright.parallelism.context.sequence_shards import in_true_order


class AllGatherAttention(CausalAttention):
    """CausalAttention of a sequence in zigzag shards, with keys and values all-gathered over `group`."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None = None) -> None:
        super().__init__(scale)
        self.group = group
        self.cp_rank, self.cp_degree = group.rank(), group.size()

    def forward(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return attended_BSNW; all arguments are this rank's shard."""
        widths = (key_BSKH.shape[-1], value_BSKW.shape[-1])
        # One collective for both: each waits for the slowest rank.
        joined_BTKE = all_gather_autograd(torch.cat((key_BSKH, value_BSKW), dim=-1), 1, self.group)
        key_BTKH, value_BTKW = (self._in_true_order(part) for part in joined_BTKE.split(widths, dim=-1))
        documents_BT = None
        if documents_BS is not None:
            documents_BT = self._in_true_order(all_gather_dim(documents_BS, 1, self.group))
        num_chunks, chunks_BCNH = 2 * self.cp_degree, query_BSNH.chunk(2, dim=1)
        attended = [
            self._attend(query_BCNH, index * query_BCNH.shape[1], key_BTKH, value_BTKW, documents_BT)
            for query_BCNH, index in zip(chunks_BCNH, (self.cp_rank, num_chunks - 1 - self.cp_rank), strict=True)
        ]
        return torch.cat(attended, dim=1)

    def _in_true_order(self, joined: Tensor) -> Tensor:
        return in_true_order(joined, 1, self.cp_degree)

    def _attend(
        self, query_BCNH: Tensor, start: int, key_BTKH: Tensor, value_BTKW: Tensor, documents_BT: Tensor | None
    ) -> Tensor:
        """Return attended_BCNW of a chunk whose first position is `start`, which sees the keys up to its end."""
        num_queries = query_BCNH.shape[1]
        end = start + num_queries
        mask = causal_mask(num_queries, end, query_BCNH.device)
        if documents_BT is not None:
            mask = mask & same_document(documents_BT[:, start:end], documents_BT[:, :end])
        key_BLKH, value_BLKW = with_fused_heads(query_BCNH, key_BTKH[:, :end], value_BTKW[:, :end])
        attended_BNCW = F.scaled_dot_product_attention(
            query_BCNH.transpose(1, 2),
            key_BLKH.transpose(1, 2),
            value_BLKW.transpose(1, 2),
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=query_BCNH.shape[2] != key_BLKH.shape[2],
        )
        return attended_BNCW.transpose(1, 2)
