"""Buffers of a model, such as running statistics: state like the parameters, but whole on every rank of a stage."""

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
    """Give every rank of a stage its first rank's persistent buffers, as a checkpoint holds them; a collective.

    Each rank's forward has updated them from its own samples only, so they would drift apart.
    """
    buffers = [buffer for buffer in persistent_buffers(model).values() if buffer.numel()]
    axes = [axis for axis in _AXES_WITHIN_A_STAGE if meshes.degree(axis) > 1]
    if not buffers or not axes:
        return
    everything = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
    # From the first rank along one axis after the other, it reaches all.
    for axis in axes:
        dist.broadcast(everything, group=meshes.group(axis), group_src=0)
    for buffer, part in zip(buffers, everything.split([buffer.nbytes for buffer in buffers]), strict=True):
        # A copy begins at an address that suits its dtype.
        buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def statistics_of(stage: nn.Module) -> list[Tensor]:
    """Return what the mixtures of experts of `stage` count in their forward passes."""
    mixtures = [module for module in stage.modules() if isinstance(module, MixtureOfExperts)]
    return [statistic for mixture in mixtures for statistic in mixture.statistics]


@contextmanager
def unchanged(statistics: Sequence[Tensor]) -> Iterator[None]:
    """Put back on the way out what `statistics` were: a backward that recomputes counts its microbatch again.

    Twice, if it comes in two parts, and a schedule may split some only: these would weigh more in a router's bias.
    """
    before = [statistic.clone() for statistic in statistics]
    yield
    for statistic, value in zip(statistics, before, strict=True):
        statistic.copy_(value)
