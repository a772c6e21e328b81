"""Initial weights of each rank's shards, which no layout changes, and a model's replicated buffers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.adapted_linear import BYTE_VALUES, adapter_names, fill_byte_values, initial_of_part
from meshwright.models.initial import fill
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallelism.data.packed_shards import PackedShards
from meshwright.parallelism.gradients import share_tied
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import (
    canonical_fqn,
    canonical_parameters,
    local_box,
    persistent_buffers,
)


def materialize(
    model: nn.Module, device_type: str, seed: int, *, offloads: bool = False, draws_weights: bool = True
) -> None:
    """Fill meta tensors of `model` in place from (seed, name, element index); all others stay as built.

    With `offloads` parameters are on the CPU, as FSDP2's CPU offload requires; buffers are on the device. Without
    `draws_weights` parameters are zero, for one who is to get others: numbers for 85 million take seconds on a core.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to_empty(device="cpu" if offloads else device_type)
    if offloads:
        move_buffers(model, device_type)
    fill_byte_values(model)
    buffers = ((canonical_fqn(fqn), buffer) for fqn, buffer in model.named_buffers())
    _draw(model, [(fqn, buffer) for fqn, buffer in buffers if not fqn.endswith(f".{BYTE_VALUES}")], device_type, seed)
    if draws_weights:
        draw_weights(model, device_type, seed)
        return
    with torch.no_grad():
        for _, parameter in canonical_parameters(model):
            local_box(parameter)[0].zero_()


def materialize_stages(stages: Stages, meshes: Meshes, seed: int, *, draws_weights: bool = True) -> None:
    """`materialize` all stages of a rank and share their tied weights; a collective."""
    for stage in stages:
        offloads = meshes.layout.cpu_offload
        materialize(stage, meshes.device_type, seed, offloads=offloads, draws_weights=draws_weights)
    share_tied(stages, meshes)


def draw_weights(model: nn.Module, device_type: str, seed: int) -> None:
    """Fill the parameters of `model` as `materialize` does; those of one without `initial` stay as they are.

    Magnitudes of an adapter (adapter_weights.py) follow from weights, and are zero until then.
    """
    if hasattr(model, "initial"):
        _draw(model, canonical_parameters(model), device_type, seed)


@torch.no_grad()
def _draw(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], device_type: str, seed: int) -> None:
    of_adapter, packed = {canonical_fqn(name) for name in adapter_names(model)}, PackedShards(model)
    for name, tensor in tensors:
        if name in packed.scales:
            continue
        if name in packed:
            wide, offsets = packed.empty(name, device_type)
            initial = model.initial(name)  # type: ignore[operator]
            fill(wide, initial, seed=seed, name=name, global_shape=packed.shape(name), offsets=offsets)
            packed.store(name, wide)
            continue
        local, offsets = local_box(tensor)
        is_part = name in of_adapter
        initial = initial_of_part(name, tensor.shape) if is_part else model.initial(name)  # type: ignore[operator]
        # Drawn on the device, also where it is kept on the CPU, which takes a minute for half a billion numbers.
        drawn = local if local.device.type == device_type else torch.empty_like(local, device=device_type)
        fill(drawn, initial, seed=seed, name=name, global_shape=tensor.shape, offsets=offsets)
        if drawn is not local:
            local.copy_(drawn)


def move_buffers(model: nn.Module, device_type: str) -> None:
    """Move the buffers of `model` that have memory to a device."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device_type))


def fill_from(model: nn.Module, named: Iterable[tuple[str, nn.Parameter]], read: Callable[[str], Tensor]) -> None:
    """Copy into each parameter of `model` this rank's shard of the full tensor that `read` returns for its name."""
    packed = PackedShards(model)
    for name, parameter in named:
        if name in packed:
            packed.store(name, packed.shard_of(name, read(name)))
        else:
            copy_shard(parameter, read(name))


@torch.no_grad()
def copy_shard(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy into `parameter` this rank's shard of a full tensor."""
    local, offsets = local_box(parameter)
    box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
    local.copy_(whole[box])


_AXES_WITHIN_A_STAGE = ("dp_replicate", "fsdp", "tp")


def share_buffers(model: nn.Module, meshes: Meshes) -> None:
    """Broadcast the persistent buffers of a stage's first rank, which a checkpoint holds; a collective.

    Each rank's forward updates them from its own samples only, so they would diverge.
    """
    buffers = [buffer for buffer in persistent_buffers(model).values() if buffer.numel()]
    axes = [axis for axis in _AXES_WITHIN_A_STAGE if meshes.degree(axis) > 1]
    if not buffers or not axes:
        return
    everything = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
    # Along one axis after another, the first rank's values reach all ranks.
    for axis in axes:
        dist.broadcast(everything, group=meshes.group(axis), group_src=0)
    for buffer, part in zip(buffers, everything.split([buffer.nbytes for buffer in buffers]), strict=True):
        # The clone is aligned for its dtype.
        buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def statistics_of(stage: nn.Module) -> list[Tensor]:
    """Return the statistics that the mixtures of experts of `stage` accumulate in forward."""
    mixtures = [module for module in stage.modules() if isinstance(module, MixtureOfExperts)]
    return [statistic for mixture in mixtures for statistic in mixture.statistics]


@contextmanager
def unchanged(statistics: Sequence[Tensor]) -> Iterator[None]:
    """Restore `statistics` on exit: recomputation in backward would count a microbatch again.

    A split backward would count it twice, and a schedule may split some microbatches only.
    """
    before = [statistic.clone() for statistic in statistics]
    yield
    for statistic, value in zip(statistics, before, strict=True):
        statistic.copy_(value)
