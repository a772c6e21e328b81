"""What an adapter's parameters start as where that follows from other tensors: magnitudes, and an adapter that is read.

A and B are drawn as any other parameter is (materialize.py).
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.errors import InfeasibleLayout
from meshwright.models.adapted_linear import AdaptedLinear, adapted_layers, adapter_names
from meshwright.models.contract import blocks_of
from meshwright.parallelism.data.materialize import copy_shard
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn, canonical_parameters, local_box
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.adapter import MAGNITUDE


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


def base_parameters(stages: Stages) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the model itself, without those of an adapter, by name."""
    own = {canonical_fqn(name) for stage in stages for name in adapter_names(stage)}
    return [(name, parameter) for name, parameter in canonical_parameters(stages) if name not in own]


def require_adapted_stages(job: Job, layout: Layout, model: nn.Module) -> None:
    """Raise InfeasibleLayout if a pipeline stage of the whole `model` would train nothing."""
    if layout.pp == 1 or not job.adapter.freezes_base:
        return
    blocks = {int(name.split(".")[1]) for name, _ in adapted_layers(model)}
    assert layout.stage_boundaries is not None
    starts = [0, *layout.stage_boundaries, len(blocks_of(model))]
    for stage, (start, end) in enumerate(pairwise(starts)):
        if not blocks & set(range(start, end)):
            raise InfeasibleLayout(
                f"layout.pp = {layout.pp}: adapter.targets match no layer of stage {stage}, blocks {start} to "
                f"{end - 1}, so its ranks would train nothing: name layers of each stage, or set layout.pp to 1"
            )


def _set_magnitude(layer: AdaptedLinear, meshes: Meshes) -> None:
    weight, magnitude = layer._parameters["weight"], layer._parameters[MAGNITUDE]
    assert weight is not None
    assert magnitude is not None
    (of_weight, rows), (local, own_rows) = local_box(weight), local_box(magnitude)
    assert rows[0] == own_rows[0]
    assert len(of_weight) == len(local)
    squares = torch.linalg.vector_norm(of_weight, dim=1, dtype=torch.float64).square()
    if isinstance(weight, DTensor) and any(placement.is_shard(1) for placement in weight.placements):
        # Gradients and states of what is offloaded are on the host, collectives on the device.
        squares = squares.to(meshes.device_type)
        dist.all_reduce(squares, group=meshes.group("tp"))
    local.copy_(squares.sqrt())
