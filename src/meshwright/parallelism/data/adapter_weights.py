"""What an adapter's parameters start as where that follows from other tensors: magnitudes, and an adapter that is read.

A and B are drawn as any other parameter is (materialize.py).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.models.adapted_linear import AdaptedLinear, PackedAdaptedLinear, adapted_layers, adapter_names
from meshwright.parallelism.data.materialize import copy_shard
from meshwright.parallelism.data.packed_shards import PackedShards, weight_shard
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn, canonical_parameters, local_box
from meshwright.spec.step.adapter import MAGNITUDE

_SUM_BITS = 62
"""Of the sum of a row's squares as an integer."""
_CHUNK_ROWS = 256


@torch.no_grad()
def set_magnitudes(stages: Stages, meshes: Meshes) -> None:
    """Set DoRA's magnitudes to the norms of the weights' rows as they are; a collective."""
    for stage in stages:
        for _, layer in adapted_layers(stage):
            if layer._parameters[MAGNITUDE] is not None:
                _set_magnitude(layer, meshes)


def copy_adapter(stages: Stages, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of an adapter's whole tensors, by name, into `stages`; none leave it as it is."""
    own = {canonical_fqn(name) for stage in stages for name in adapter_names(stage)}
    for name, parameter in canonical_parameters(stages):
        if name in own and tensors:
            copy_shard(parameter, tensors[name])


def base_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the model itself, without those of an adapter and scales of packed weights, by name."""
    stages = model if isinstance(model, Stages) else [model]
    own = {canonical_fqn(name) for stage in stages for name in adapter_names(stage)} | PackedShards(model).scales
    return [(name, parameter) for name, parameter in canonical_parameters(model) if name not in own]


def _set_magnitude(layer: AdaptedLinear, meshes: Meshes) -> None:
    weight, magnitude = layer._parameters["weight"], layer._parameters[MAGNITUDE]
    assert weight is not None
    assert magnitude is not None
    (of_weight, (row, _)), (local, (own_row,)) = local_box(weight), local_box(magnitude)
    assert (row, len(of_weight)) == (own_row, len(local))
    if isinstance(layer, PackedAdaptedLinear):
        of_weight = weight_shard(layer)
    is_cut = isinstance(weight, DTensor) and any(placement.is_shard(1) for placement in weight.placements)
    group = meshes.group("tp") if is_cut else None
    local.copy_(_row_norms(of_weight.detach().to(meshes.device_type), layer.in_features, group))


def _row_norms(part: Tensor, num_columns: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the norms of rows of `num_columns`, of which the ranks of `group` hold parts, in float64.

    Squares are summed as integers, whose sum has no order: initial weights are the same bits under all layouts.
    """
    largest = torch.linalg.vector_norm(part, math.inf, dim=1).double()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    exponent = _SUM_BITS - math.ceil(math.log2(num_columns)) - torch.frexp(largest.square()).exponent
    chunks = zip(part.split(_CHUNK_ROWS), exponent.split(_CHUNK_ROWS), strict=True)
    units = torch.cat([torch.ldexp(rows.double().square(), of[:, None]).round().long().sum(1) for rows, of in chunks])
    if group is not None:
        dist.all_reduce(units, group=group)
    return torch.ldexp(units.double(), -exponent).sqrt()
