"""Gradients that backward has not made on this rank: zeros, so that all ranks sum gradients of the same parameters.

A model may use what a sample asks for, such as a branch for images of which a rank has none in some step. Left out on
one rank, a gradient would be summed there with that of another parameter of the same size, without an error.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallelism.collectives import all_reduce_max
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages


def complete_gradients(stages: Stages, meshes: Meshes) -> None:
    """Give zeros to parameters that no backward of a step gave a gradient, note them in stages.missing, and wait for
    sums over replicas; a collective.

    But for those of FSDP2, which has done so (torch_fsdp.py) in all units that have run, and must on several ranks; and
    where backward has used and freed others.
    """
    is_alone = meshes.degree("fsdp") == meshes.degree("dp_replicate") == 1 and not meshes.has_outer_replicas
    for stage in stages:
        if not stages.updates_in_backward and (is_alone or not isinstance(stage, FSDPModule)):
            for parameter in stage.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    stages.missing.add(parameter)
    stages.end_replica_sums()


@torch.no_grad()
def unused_everywhere(
    parameters: Sequence[nn.Parameter], missing: Collection[nn.Parameter], meshes: Meshes
) -> set[nn.Parameter]:
    """Return those of `missing`, which had no gradient on this rank, that had none on any other; a collective.

    All gradients are summed already. Those of independent replicas, which are of no common group, are seen there alone.
    """
    if not parameters:
        return set()
    used = [parameter not in missing or _is_any(parameter.grad) for parameter in parameters]
    flags = torch.tensor(used, dtype=torch.float32, device=meshes.device_type)
    for axis in ("fsdp", "dp_replicate"):
        if meshes.degree(axis) > 1:
            flags = all_reduce_max(flags, meshes.group(axis))
    if not missing:
        return set()
    return {parameter for parameter, flag in zip(parameters, flags.double().tolist(), strict=True) if not flag}


def _is_any(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.count_nonzero().double().item())
