"""Update: what every step by hand ends with: from summed gradients to new weights, with one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.spec.job.job import Job


class Update:
    """Callable: scales, clips by the norm over all ranks, and runs AdamW."""

    def __init__(self, job: Job, parameters: Sequence[Tensor], num_copies: Sequence[int]) -> None:
        self._parameters, self._max_norm = parameters, job.optimizer.max_grad_norm
        self._weights = 1 / torch.tensor(num_copies, dtype=torch.float32)
        section = job.optimizer
        self._optimizer = torch.optim.AdamW(
            parameters, section.learning_rate, section.betas, section.eps, section.weight_decay, fused=True
        )

    def __call__(self, loss: Tensor, num_summed: int) -> float:
        """Return the sum of `loss` over ranks; gradients are sums of `num_summed` mean losses."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        both = torch.stack(((squares * self._weights).sum(), loss.detach()))
        dist.all_reduce(both)
        square: float
        total: float
        square, total = both.tolist()
        norm = math.sqrt(square) / num_summed
        torch._foreach_mul_(gradients, min(self._max_norm / (norm + 1e-6), 1.0) / num_summed)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total
