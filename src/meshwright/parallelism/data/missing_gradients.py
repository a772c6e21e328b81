"""Gradients that backward has not made on this rank: zeros, so that all ranks sum gradients of the same parameters.

A model may use what a sample asks for, such as a branch for images of which a rank has none in some step. Left out on
one rank, a gradient would be summed there with that of another parameter of the same size, without an error.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallelism.collectives import all_reduce_max
from meshwright.parallelism.mesh import Meshes


def fill_missing(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Give zeros to the parameters that train and have no gradient, and return them."""
    missing = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    return missing


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
