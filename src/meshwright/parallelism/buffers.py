"""Buffers of a model, such as running statistics: state like the parameters, but whole on every rank."""

import torch
from torch import distributed as dist
from torch import nn

from meshwright.parallelism.torch_compat import persistent_buffers


def share_buffers(model: nn.Module) -> None:
    """Give every rank the first rank's persistent buffers, as a checkpoint holds them; a collective if there are any.

    Each rank's forward has updated them from its own samples only, so they would drift apart.
    """
    buffers = [buffer for buffer in persistent_buffers(model).values() if buffer.numel()]
    if not buffers or dist.get_world_size() == 1:
        return
    everything = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(everything, src=0)
    for buffer, part in zip(buffers, everything.split([buffer.nbytes for buffer in buffers]), strict=True):
        # A copy begins at an address that suits its dtype.
        buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))
