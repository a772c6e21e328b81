"""The global gradient norm, and clipping by it, over sharded parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Return the global 2-norm of the gradients before clipping; scale them in place if it exceeds `max_norm`.

    `max_norm` = 0 measures only. A collective when parameters are sharded.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
