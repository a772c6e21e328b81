"""Expert parallelism: each rank holds some experts of each mixture (ep), or a part of each expert (etp).

With etp = 1 the tensor-parallel ranks route the tokens of their own share of the sequence, like any ranks that see
different tokens, and ep reaches over them too. With etp = tp they have gathered the sequence, route the same tokens,
and each computes a part of every sum (sharding/moe.py). Either way each of them adds the router's losses to a gradient
that is summed over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.models.moe import Experts, MixtureOfExperts
from meshwright.parallelism.collectives import all_reduce_sum
from meshwright.parallelism.expert.token_exchange import TokenExchange
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.tensor_modules import ReadsParts, change_class
from meshwright.spec.layout.layout import Layout

_FFN_DIMS = {"gate": 1, "up": 1, "down": 2}
"""The dim of each parameter that is the width inside an expert; dim 0 counts the experts."""


def apply_expert_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Change every mixture of experts of `model` in place, so that it computes with this rank's part of the experts."""
    for mixture in model.modules():
        if isinstance(mixture, MixtureOfExperts):
            _place_experts(mixture.experts, meshes)
            _place_router(mixture, meshes)
            if have_own_ranks(meshes.layout):
                # FSDP2 gathers them when they are called, which the compiler cannot follow into a larger graph.
                mixture.experts.is_eager = mixture.dispatch.is_eager = True  # type: ignore[assignment]


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters FSDP2 shards over "expert_dp_shard", not with the rest of their block."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def have_own_ranks(layout: Layout) -> bool:
    """Return whether FSDP2 gathers experts alone, since other ranks share them than share the rest of their block."""
    return layout.ep > 1 or layout.tp > 1


def expert_shard_dim(parameter: nn.Parameter, expert_dp_shard: int) -> int:
    """Return the dim of an expert parameter that FSDP2 should shard over `expert_dp_shard` ranks.

    That of the experts if it divides evenly, else one that does, preferably not cut already; FSDP2 pads dim 0 only.
    """
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    is_cut = [part.shape[dim] != parameter.shape[dim] for dim in range(part.dim())]
    dims = [0, *sorted(range(1, part.dim()), key=lambda dim: is_cut[dim])]
    return next((dim for dim in dims if part.shape[dim] % expert_dp_shard == 0), 0)


def _place_experts(experts: Experts, meshes: Meshes) -> None:
    """Leave this rank's part of each parameter, as a DTensor over those of ("ep", "etp") that have several ranks."""
    axes = [axis for axis in ("ep", "etp") if meshes.degree(axis) > 1]
    if not axes:
        return
    for name, parameter in list(experts.named_parameters()):
        dims = {"ep": 0, "etp": _FFN_DIMS[name]}
        part = parameter.detach()
        for axis in axes:
            assert part.shape[dims[axis]] % meshes.degree(axis) == 0, f"layout.{axis} does not divide {name}"
            part = part.chunk(meshes.degree(axis), dims[axis])[meshes.rank(axis)]
        placed = DTensor.from_local(
            part.contiguous(),
            meshes.experts[tuple(axes)],
            [Shard(dims[axis]) for axis in axes],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        experts.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    change_class(experts, ReadsParts, meshes.group("etp"))


def _place_router(mixture: MixtureOfExperts, meshes: Meshes) -> None:
    """Let the router know of the ranks that see other tokens of the same sequences, and of other experts."""
    if meshes.degree("ep") > 1:
        mixture.register_module("dispatch", TokenExchange(meshes.group("ep"), mixture.router.experts_per_token))
    axes = ("cp", "tp") if meshes.degree("etp") == 1 else ("cp",)
    mixture.router.share_counts = partial(_sum_over, groups=[meshes.group(axis) for axis in axes])
    mixture.router.loss_scale = 1 / meshes.degree("tp")


def _sum_over(counts_BE: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        counts_BE = all_reduce_sum(counts_BE, group)
    return counts_BE
