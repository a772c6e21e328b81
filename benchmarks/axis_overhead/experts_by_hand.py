"""Expert parallelism by hand: half of the experts on each of two ranks, tokens exchanged by their true numbers.

Shapes: T tokens, K choices, R = T K rows, D dim, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from benchmarks.axis_overhead.collectives import exchange
from benchmarks.axis_overhead.plain_model import Weights

NUM_CHOICES = 2
_NAMES = ("gate", "up", "down")


def own_experts(weights: Weights) -> dict[str, Tensor]:
    """Return this rank's experts of a block, as parameters."""
    names = [f"ffn.experts.{name}" for name in _NAMES]
    parts = {name: weights[name].chunk(dist.get_world_size())[dist.get_rank()] for name in names}
    return {name: part.clone().requires_grad_() for name, part in parts.items()}


def mixture(x_BSD: Tensor, weights: Weights) -> Tensor:
    """Return what the mixture of experts adds."""
    x_TD = x_BSD.flatten(0, 1)
    scores_TE = F.linear(x_TD, weights["ffn.router.weight"]).softmax(-1)
    weight_TK, expert_TK = scores_TE.topk(NUM_CHOICES, dim=-1)
    weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    order_R = expert_TK.flatten().argsort(stable=True)
    counts_E = expert_TK.flatten().bincount(minlength=scores_TE.shape[1])
    done_RD = _through_experts(x_TD[order_R // NUM_CHOICES], counts_E, weights)
    unsorted_TKD = torch.empty_like(done_RD).index_copy(0, order_R, done_RD).view(*expert_TK.shape, -1)
    return (unsorted_TKD * weight_TK[..., None]).sum(1).view_as(x_BSD)


def _through_experts(rows_RD: Tensor, counts_E: Tensor, weights: Weights) -> Tensor:
    num_ranks = dist.get_world_size()
    arriving_PL = torch.empty_like(counts_E).view(num_ranks, -1)
    dist.all_to_all_single(arriving_PL, counts_E.view(num_ranks, -1))
    sent = counts_E.view(num_ranks, -1).sum(1).tolist()
    counts = arriving_PL.tolist()
    received = [sum(of_rank) for of_rank in counts]
    arrived = exchange(rows_RD, received, sent)
    pieces = arrived.split([count for of_rank in counts for count in of_rank])
    num_own = len(counts[0])
    # Those of one expert together, from all ranks.
    rows_of = [torch.cat([pieces[rank * num_own + expert] for rank in range(num_ranks)]) for expert in range(num_own)]
    done = [_expert(rows, number, weights).split([c[number] for c in counts]) for number, rows in enumerate(rows_of)]
    by_source = [done[expert][rank] for rank in range(num_ranks) for expert in range(num_own)]
    return exchange(torch.cat(by_source), sent, received)


def _expert(rows_QD: Tensor, number: int, weights: Weights) -> Tensor:
    gate, up, down = (weights[f"ffn.experts.{name}"][number] for name in _NAMES)
    return F.linear(F.silu(F.linear(rows_QD, gate)) * F.linear(rows_QD, up), down)
