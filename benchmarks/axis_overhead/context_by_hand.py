"""Context parallelism by hand, for two ranks: rank 0 has the first and the last quarter of a sequence, rank 1 the rest.

With ulysses each has one half. Shapes: B batch, S positions here, T = 2 S, N heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from benchmarks.axis_overhead.collectives import exchange, gather_sequence
from benchmarks.axis_overhead.plain_model import causal

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def gathered_attention(rank: int) -> Attend:
    """Return attention to the keys of both ranks."""
    masks: dict[int, list[Tensor]] = {}

    def attend(query_BSNH: Tensor, key_BSKH: Tensor, value_BSKH: Tensor) -> Tensor:
        joined = gather_sequence(torch.cat((key_BSKH, value_BSKH), dim=-1)).chunk(4, dim=1)
        key, value = (x.transpose(1, 2) for x in torch.cat([joined[i] for i in (0, 2, 3, 1)], 1).chunk(2, -1))
        length = query_BSNH.shape[1] // 2
        ends = [(quarter + 1) * length for quarter in (rank, 3 - rank)]
        if length not in masks:
            masks[length] = [torch.ones(length, end, dtype=torch.bool).tril(end - length) for end in ends]
        parts = [
            F.scaled_dot_product_attention(query, key[:, :, :end], value[:, :, :end], attn_mask=mask, enable_gqa=True)
            for query, end, mask in zip(query_BSNH.transpose(1, 2).chunk(2, 2), ends, masks[length], strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return attend


def ulysses_attention(rank: int) -> Attend:
    """Return attention of half of the heads to the whole sequence."""

    def attend(*heads: Tensor) -> Tensor:
        shared = [x.unflatten(2, (2, -1)) for x in heads]
        joined_2BSE = torch.cat([x.flatten(3) for x in shared], dim=3).movedim(2, 0)
        arrived_BTE = exchange(joined_2BSE).movedim(0, 1).flatten(1, 2)
        parts = arrived_BTE.split([x.shape[3] * x.shape[4] for x in shared], dim=2)
        attended_BTNH = causal(*(part.unflatten(2, x.shape[3:]) for part, x in zip(parts, shared, strict=True)))
        return exchange(attended_BTNH.unflatten(1, (2, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)

    return attend


def ring_attention(rank: int) -> Attend:
    """Return attention to one's own keys while the other rank's are on their way."""

    def attend(query_BSNH: Tensor, key_BSKH: Tensor, value_BSKH: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (query_BSNH, key_BSKH, value_BSKH))
        attended_BNSH: Tensor = _Ring.apply(*heads, rank)  # type: ignore[no-untyped-call]
        return attended_BNSH.transpose(1, 2)

    return attend


def _swap(tensors: list[Tensor], rank: int) -> tuple[list[Tensor], list[dist.Work]]:
    """Return where the other rank's tensors are arriving, and what to wait for."""
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    sends = [dist.P2POp(dist.isend, tensor, 1 - rank) for tensor in tensors]
    receives = [dist.P2POp(dist.irecv, tensor, 1 - rank) for tensor in arriving]
    return arriving, dist.batch_isend_irecv([*sends, *receives])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _seen(rank: int, length: int) -> tuple[slice, slice]:
    """Return which own queries see which of the other's keys: rank 1's all the first half, rank 0's second half all."""
    return (slice(length // 2, None), slice(None)) if rank == 0 else (slice(None), slice(length // 2))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rank: int) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        (other_key, other_value), works = _swap([key, value], rank)
        attended: Tensor
        attended, lse = _flash(query, key, value, 0.0, True)
        _wait(works)
        rows, keys = _seen(rank, query.shape[2])
        other, other_lse = _flash(query[:, :, rows], other_key[:, :, keys], other_value[:, :, keys], 0.0, False)
        both = torch.logaddexp(lse[:, :, rows], other_lse)
        shares = [(part - both).exp()[..., None] for part in (lse[:, :, rows], other_lse)]
        attended[:, :, rows] = attended[:, :, rows] * shares[0] + other * shares[1]
        lse[:, :, rows] = both
        ctx.save_for_backward(query, key, value, attended, lse)
        ctx.rank = rank
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, lse = ctx.saved_tensors
        (other_key, other_value), works = _swap([key, value], ctx.rank)
        gradient = gradient.contiguous()
        of_query, of_key, of_value = _flash_backward(gradient, query, key, value, attended, lse, 0.0, True)
        _wait(works)
        rows, keys = _seen(ctx.rank, query.shape[2])
        seen = [other_key[:, :, keys], other_value[:, :, keys]]
        queried = [x[:, :, rows] for x in (gradient, query, attended, lse)]
        more = _flash_backward(queried[0], queried[1], *seen, *(x.contiguous() for x in queried[2:]), 0.0, False)
        of_query[:, :, rows] += more[0]
        leaving = [torch.zeros_like(other_key), torch.zeros_like(other_value)]
        for whole, part in zip(leaving, more[1:], strict=True):
            whole[:, :, keys] = part
        (home_key, home_value), works = _swap(leaving, ctx.rank)
        _wait(works)
        return of_query, of_key + home_key, of_value + home_value, None
