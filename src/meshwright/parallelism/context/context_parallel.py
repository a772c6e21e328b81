"""Context parallelism: the cp ranks shard each sequence; only attention communicates.

all-gather   keys and values are all-gathered; each rank attends with its own queries
ring         ring_attention.py
ulysses      all-to-alls turn a shard of the sequence into a shard of the heads, and back

Shapes: B batch, S positions of this rank, T of the whole sequence, C = S / 2 of one chunk, L keys that a chunk sees,
P ranks, N query heads, K key/value heads, H width of a query or key head, W of a value head, E elements per position
and rank.

Positions of a sequence that each context-parallel rank holds, and how shards are put back in order.
Under a causal mask later queries cost more. For equal work per rank, all-gather and ring cut the sequence into two
chunks per rank: rank r holds chunk r from the start and chunk r from the end (zigzag). Ulysses gives each rank whole
heads of the whole sequence, so its ranks hold contiguous shards.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.errors import InfeasibleLayout, UnsupportedError
from meshwright.models.attention.attention_choice import WHOLE_SEQUENCE
from meshwright.models.attention.causal_attention import (
    CausalAttention,
    attend,
    causal_mask,
    same_document,
    with_sink_scores,
)
from meshwright.models.contract import is_stage_without_blocks
from meshwright.parallelism.collectives import all_gather_autograd, all_gather_dim, exchange_rows
from meshwright.parallelism.context.ring_attention import RingAttention
from meshwright.parallelism.mesh import Meshes
from meshwright.spec.layout.layout import ContextMethod
from meshwright.units import nearest_multiples


def apply_context_parallel(model: nn.Module, meshes: Meshes, seq_len: int) -> None:
    """Replace each CausalAttention of `model` in place by a context-parallel one; raises UnsupportedError."""
    layout = meshes.layout
    if layout.cp == 1:
        return
    # Raises for a sequence that cannot be split, before training.
    sequence_indices(seq_len, meshes.rank("cp"), layout.cp, layout.cp_method)
    attentions = {name: module for name, module in model.named_modules() if type(module) in WHOLE_SEQUENCE}
    if not is_stage_without_blocks(model):
        _require_splittable(model, attentions, layout.cp)
    for name, attention in attentions.items():
        model.set_submodule(name, _shared(attention, layout.cp_method, meshes.group("cp")))


def _shared(attention: CausalAttention, method: ContextMethod, group: dist.ProcessGroup) -> nn.Module:
    """Return what takes the place of `attention` where the ranks of `group` share the sequence."""
    if method == "ulysses":
        return UlyssesAttention(group, attention)
    assert type(attention) is CausalAttention, "refused by spec/job/rules/attention_rules.py"
    return _ATTENTION[method](group, attention.scale, attention.window)


def _require_splittable(model: nn.Module, attentions: Mapping[str, CausalAttention], cp: int) -> None:
    missing = []
    if not getattr(model, "takes_positions", False):
        missing.append("takes_positions = True and forward(inputs, positions, documents)")
    if not attentions:
        missing.append("attention computed by modules of meshwright.models.attention.causal_attention.CausalAttention")
    if missing:
        raise UnsupportedError(
            f"layout.cp = {cp}: {type(model).__name__} does not support sharding of sequences; give it "
            f"{' and '.join(missing)} (see meshwright/models/contract.py), or set layout.cp to 1"
        )


class AllGatherAttention(CausalAttention):
    """CausalAttention of a sequence in zigzag shards, with keys and values all-gathered over `group`."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None = None, window: int | None = None) -> None:
        super().__init__(scale, window)
        self.group = group
        self.cp_rank, self.cp_degree = group.rank(), group.size()

    def forward(
        self,
        query_BSNH: Tensor,
        key_BSKH: Tensor,
        value_BSKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attended_BSNW; all arguments are this rank's shard."""
        scale = self.scale
        if sinks_N is not None:
            query_BSNH, scale = with_sink_scores(query_BSNH, sinks_N, scale)
        widths = (key_BSKH.shape[-1], value_BSKW.shape[-1])
        # One collective for both: each waits for the slowest rank.
        joined_BTKE = all_gather_autograd(torch.cat((key_BSKH, value_BSKW), dim=-1), 1, self.group)
        key_BTKH, value_BTKW = (self._in_true_order(part) for part in joined_BTKE.split(widths, dim=-1))
        documents_BT = None
        if documents_BS is not None:
            documents_BT = self._in_true_order(all_gather_dim(documents_BS, 1, self.group))
        num_chunks, chunks_BCNH = 2 * self.cp_degree, query_BSNH.chunk(2, dim=1)
        attended = [
            self._attend(query_BCNH, index * query_BCNH.shape[1], key_BTKH, value_BTKW, documents_BT, scale)
            for query_BCNH, index in zip(chunks_BCNH, (self.cp_rank, num_chunks - 1 - self.cp_rank), strict=True)
        ]
        return torch.cat(attended, dim=1)

    def _in_true_order(self, joined: Tensor) -> Tensor:
        return in_true_order(joined, 1, self.cp_degree)

    def _attend(
        self,
        query_BCNH: Tensor,
        start: int,
        key_BTKH: Tensor,
        value_BTKW: Tensor,
        documents_BT: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Return attended_BCNW of a chunk whose first position is `start`, which sees the keys up to its end."""
        num_queries = query_BCNH.shape[1]
        first, end = 0 if self.window is None else max(0, start - self.window + 1), start + num_queries
        mask = causal_mask(num_queries, end - first, query_BCNH.device, self.window)
        if documents_BT is not None:
            mask = mask & same_document(documents_BT[:, start:end], documents_BT[:, first:end])
        return attend(query_BCNH, key_BTKH[:, first:end], value_BTKW[:, first:end], mask, scale)


class UlyssesAttention(CausalAttention):
    """Attention of N / P heads of the whole sequence on each rank of `group`, by any backend."""

    def __init__(self, group: dist.ProcessGroup, whole: CausalAttention) -> None:
        super().__init__(whole.scale, whole.window)
        self.group, self.cp_degree = group, group.size()
        self.is_eager = getattr(whole, "is_eager", False)
        self.whole = whole

    def forward(
        self,
        query_BSNH: Tensor,
        key_BSKH: Tensor,
        value_BSKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
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
        own_sinks = None if sinks_N is None else sinks_N.chunk(self.cp_degree)[self.group.rank()]
        # Not called as a module: it is no scope of its own in traces and profiles.
        attended_BTNW = self.whole.forward(query_BTNH, key_BTKH, value_BTKW, documents_BT, own_sinks)
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


_ATTENTION: dict[ContextMethod, Callable[[dist.ProcessGroup, float | None, int | None], nn.Module]] = {
    "all-gather": AllGatherAttention,
    "ring": RingAttention,
}


def sequence_indices(seq_len: int, cp_rank: int, cp_degree: int, method: ContextMethod) -> Tensor:
    """Return positions_S that a context-parallel rank holds, ascending; raises InfeasibleLayout for uneven shards."""
    num_chunks = cp_degree if method == "ulysses" or cp_degree == 1 else 2 * cp_degree
    if seq_len % num_chunks:
        choices = " or ".join(str(value) for value in nearest_multiples(seq_len, num_chunks))
        raise InfeasibleLayout(
            f"train.seq_len = {seq_len}: must be a multiple of {num_chunks} for layout.cp = {cp_degree} with "
            f'layout.cp_method = "{method}"; set train.seq_len to {choices}, or change layout.cp'
        )
    chunks = torch.arange(seq_len).chunk(num_chunks)
    if num_chunks == cp_degree:
        return chunks[cp_rank]
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))


def in_true_order(x: Tensor, dim: int, cp_degree: int) -> Tensor:
    """Return the sequence along `dim`, given the concatenated zigzag shards `x`."""
    chunks = x.chunk(2 * cp_degree, dim)
    # The ranks' first chunks are the first half in order; their second chunks are the second half reversed.
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)
