"""Ulysses context parallelism: all-to-alls turn a shard of the sequence into a shard of the heads, and back.

Shapes: B batch, S positions of this rank, T = P S of the whole sequence, P ranks, N query heads, K key/value heads,
H width of a query or key head, W of a value head, E elements per position and rank.
"""

import math

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.errors import InfeasibleLayout
from meshwright.models.attention import CausalAttention
from meshwright.parallelism.collectives import all_gather_dim
from meshwright.parallelism.expert.token_exchange import exchange_rows


class UlyssesAttention(CausalAttention):
    """CausalAttention of N / P heads of the whole sequence on each rank of `group`."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None = None) -> None:
        super().__init__(scale)
        self.group, self.cp_degree = group, group.size()

    def forward(
        self, query_BSNH: Tensor, key_BSKH: Tensor, value_BSKW: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return attended_BSNW; all arguments are this rank's shard."""
        num_heads, num_kv_heads = query_BSNH.shape[2], key_BSKH.shape[2]
        if num_heads % self.cp_degree:
            raise InfeasibleLayout(
                f'layout.cp = {self.cp_degree}: layout.cp_method = "ulysses" needs a divisor of the {num_heads} query '
                "heads per rank (the model's, divided by layout.tp); change layout.cp or layout.tp, or set "
                'layout.cp_method to "all-gather" or "ring"'
            )
        # Repeated so that each rank gets equally many, including all that its query heads attend to.
        repeats = math.lcm(num_kv_heads, self.cp_degree) // num_kv_heads
        if repeats > 1:
            key_BSKH, value_BSKW = (x.repeat_interleave(repeats, dim=2) for x in (key_BSKH, value_BSKW))
        query_BTNH, key_BTKH, value_BTKW = self._shard_heads(query_BSNH, key_BSKH, value_BSKW)
        documents_BT = None if documents_BS is None else all_gather_dim(documents_BS, 1, self.group)
        attended_BTNW = super().forward(query_BTNH, key_BTKH, value_BTKW, documents_BT)
        return self._shard_sequence(attended_BTNW)

    def _shard_heads(self, *parts: Tensor) -> list[Tensor]:
        """Return each of `parts` [B, S, heads, width] as [B, T, heads / P, width]; one collective for all."""
        shared = [part.unflatten(2, (self.cp_degree, -1)) for part in parts]
        joined_BSPE = torch.cat([part.flatten(3) for part in shared], dim=3)
        arrived_BTE = self._exchange(joined_BSPE.movedim(2, 0)).movedim(0, 1).flatten(1, 2)
        sizes = [part.shape[3] * part.shape[4] for part in shared]
        split = arrived_BTE.split(sizes, dim=2)
        return [part.unflatten(2, like.shape[3:]) for part, like in zip(split, shared, strict=True)]

    def _shard_sequence(self, x_BTNW: Tensor) -> Tensor:
        """Return x_BSNW: all heads of this rank's shard of the sequence."""
        by_rank_PBSNW = x_BTNW.unflatten(1, (self.cp_degree, -1)).movedim(1, 0)
        return self._exchange(by_rank_PBSNW).movedim(0, 2).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Return what each rank sent to this one; parts[0] goes to rank 0."""
        one_each = [1] * self.cp_degree
        return exchange_rows(parts, one_each, one_each, self.group)
