"""Persistent buffers of a model, such as running statistics: replicated on every rank of a stage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_compat import persistent_buffers

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
