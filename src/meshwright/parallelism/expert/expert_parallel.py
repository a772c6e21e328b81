"""Expert parallelism: each rank holds some experts of each mixture (ep), or a shard of each expert (etp).

With etp = 1 the tensor-parallel ranks route the tokens of their own shard of the sequence, like any ranks with
different tokens, and ep spans them too. With etp = tp they have all-gathered the sequence, route the same tokens, and
compute partial sums (sharding_plan.py). In both cases the gradient of the router's losses is summed over them.

All-to-alls send tokens to the ranks of their experts, and back. Nothing is padded or dropped: each pair of ranks
exchanges exactly the routed rows, possibly none. Each rank sends its own tokens, so the experts' gradients sum over all
tokens of the group.

Shapes: E experts, P ranks of the group, L = E / P experts on this rank, R rows here, Q rows received, D dim.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.models.expert_rows import reorder
from meshwright.models.moe import Experts, MixtureOfExperts
from meshwright.parallelism.collectives import all_reduce_sum, all_to_all_rows, exchange_rows
from meshwright.parallelism.host_sync import read_on_host
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.layers import ShardedModule, change_class
from meshwright.spec.layout.layout import Layout

_FFN_DIMS = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": None}
"""Dim of each parameter that is the width inside an expert, None where none is; dim 0 counts the experts."""


def apply_expert_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Shard every mixture of experts of `model` in place."""
    for mixture in model.modules():
        if isinstance(mixture, MixtureOfExperts):
            _place_experts(mixture.experts, meshes)
            _place_router(mixture, meshes)
            if have_own_ranks(meshes.layout):
                # FSDP2's hooks on the experts cannot be compiled into the block's graph.
                mixture.experts.is_eager = mixture.dispatch.is_eager = True  # type: ignore[assignment]


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters FSDP2 shards over "expert_dp_shard", not with the rest of their block."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def have_own_ranks(layout: Layout) -> bool:
    """Return whether experts are an FSDP2 unit of their own, sharded over other ranks than the rest of their block."""
    return layout.ep > 1 or layout.tp > 1


def expert_shard_dim(parameter: nn.Parameter, expert_dp_shard: int) -> int:
    """Return the dim of an expert parameter that FSDP2 should shard over `expert_dp_shard` ranks.

    Dim 0, the experts, if it divides evenly, else another that does, preferably unsharded; FSDP2 pads dim 0 only.
    """
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    is_sharded = [part.shape[dim] != parameter.shape[dim] for dim in range(part.dim())]
    dims = [0, *sorted(range(1, part.dim()), key=lambda dim: is_sharded[dim])]
    return next((dim for dim in dims if part.shape[dim] % expert_dp_shard == 0), 0)


def _place_experts(experts: Experts, meshes: Meshes) -> None:
    """Replace each parameter by its shard, a DTensor over those of ("ep", "etp") that have several ranks.

    A parameter without the width inside an expert is replicated over "etp".
    """
    axes = [axis for axis in ("ep", "etp") if meshes.degree(axis) > 1]
    if not axes:
        return
    for name, parameter in list(experts.named_parameters()):
        dims = {"ep": 0, "etp": _FFN_DIMS[name]}
        part = parameter.detach()
        for axis in axes:
            if (dim := dims[axis]) is None:
                continue
            assert part.shape[dim] % meshes.degree(axis) == 0, f"layout.{axis} does not divide {name}"
            part = part.chunk(meshes.degree(axis), dim)[meshes.rank(axis)]
        placed = DTensor.from_local(
            part.contiguous(),
            meshes.experts[tuple(axes)],
            [Replicate() if (dim := dims[axis]) is None else Shard(dim) for axis in axes],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        experts.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    change_class(experts, ShardedExperts, meshes.group("etp"))


class ShardedExperts(ShardedModule):
    """Experts of which a rank has a shard; with etp its outputs are partial sums."""

    def local_shard(self, name: str) -> Tensor:
        """Return the shard, or the bias of the output divided by the number of ranks, which all add it."""
        shard = super().local_shard(name)
        return shard / self.tp_group.size() if name == "down_bias" else shard


def _place_router(mixture: MixtureOfExperts, meshes: Meshes) -> None:
    """Let the router dispatch to experts of other ranks, and count the tokens of all shards of its sequences."""
    if meshes.degree("ep") > 1:
        mixture.register_module("dispatch", TokenExchange(meshes.group("ep"), mixture.router.experts_per_token))
    axes = ("cp", "tp") if meshes.degree("etp") == 1 else ("cp",)
    mixture.router.share_counts = partial(_sum_over, groups=[meshes.group(axis) for axis in axes])
    mixture.router.loss_scale = 1 / meshes.degree("tp")


def _sum_over(counts_BE: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        counts_BE = all_reduce_sum(counts_BE, group)
    return counts_BE


class TokenExchange(nn.Module):
    """Replacement of a mixture's `dispatch` for experts on several ranks."""

    is_eager = True
    """The number of received rows is known at run time only, so torch.compile cannot trace it."""

    def __init__(self, group: dist.ProcessGroup, experts_per_token: int) -> None:
        super().__init__()
        self._group, self._experts_per_token = group, experts_per_token

    def forward(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return each row's output, in order; rows are sorted by expert, `counts_E` for each."""
        counts_PL = exchange_counts(counts_E, self._group)
        # One device-to-host sync for both the sent and the received sizes.
        sizes_2P = torch.cat([counts_E.view_as(counts_PL).sum(1), counts_PL.sum(1)])
        kind = "rows sent to and received from each rank"
        # A token goes to each expert at most once.
        most = len(rows_RD) // self._experts_per_token * min(self._experts_per_token, counts_PL.shape[1])
        sizes = read_on_host(sizes_2P, kind, len(rows_RD), self._group.rank(), most)
        sent, received = sizes[: len(counts_PL)], sizes[len(counts_PL) :]
        arrived_QD = exchange_rows(rows_RD, sent, received, self._group)
        by_expert_Q = expert_order(counts_PL, sum(received))
        by_source_Q = by_expert_Q.argsort()
        done_QD = experts(reorder(arrived_QD, by_expert_Q, by_source_Q), counts_PL.sum(0))
        return exchange_rows(reorder(done_QD, by_source_Q, by_expert_Q), received, sent, self._group)


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return counts_PL: the rows from each rank for each expert of this rank."""
    equal = [len(counts_E) // group.size()] * group.size()
    return all_to_all_rows(counts_E, equal, equal, group).view(group.size(), -1)


def expert_order(counts_PL: Tensor, num_rows: int) -> Tensor:
    """Return the permutation that sorts rows received by source rank by expert."""
    num_sources, num_experts = counts_PL.shape
    experts_PL = torch.arange(num_experts, device=counts_PL.device).repeat(num_sources)
    return experts_PL.repeat_interleave(counts_PL.flatten(), output_size=num_rows).argsort(stable=True)
