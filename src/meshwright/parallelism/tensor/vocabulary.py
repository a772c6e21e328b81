"""The next-token loss of logits that are cut along the vocabulary: no rank ever has a whole row of them.

Shapes: B batch, S positions, T = B x S, V this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.errors import ConfigError
from meshwright.models.rope import at_least_float32
from meshwright.parallelism.collectives import all_reduce_max, all_reduce_sum


def vocabulary_parallel_losses(logits_BSV: Tensor, targets_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return losses_T: the cross-entropy of each target in nats, in float32 at least; 0 for targets of -100.

    `group` holds the vocabulary, each rank as many rows as the others, in their order.
    """
    if logits_BSV.shape[:-1] != targets_BS.shape:
        raise ConfigError(
            f"the model's forward returned {tuple(logits_BSV.shape)} on this rank for targets of "
            f"{tuple(targets_BS.shape)}, but under layout.tp it returns the logits of the whole sequence for its share "
            "of the vocabulary: give the last layer the role head in tensor_parallel"
        )
    losses_T: Tensor = _VocabularyParallelLosses.apply(logits_BSV.flatten(0, -2), targets_BS.flatten(), group)  # type: ignore[no-untyped-call]
    return losses_T


class _VocabularyParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide_TV = at_least_float32(logits_TV)
        row_T = target_T - group.rank() * wide_TV.shape[1]
        is_here_T = (row_T >= 0) & (row_T < wide_TV.shape[1])
        row_T = row_T.where(is_here_T, 0)
        max_T = all_reduce_max(wide_TV.amax(1), group)
        shifted_TV = wide_TV - max_T[:, None]
        target_logit_T = shifted_TV.gather(1, row_T[:, None])[:, 0].where(is_here_T, 0)
        probability_TV = shifted_TV.exp_()
        sums = torch.stack((probability_TV.sum(1), target_logit_T, is_here_T.type_as(wide_TV)))
        sum_T, target_logit_T, num_found_T = all_reduce_sum(sums, group)
        probability_TV /= sum_T[:, None]
        ctx.save_for_backward(probability_TV, row_T, is_here_T, target_T)
        ctx.dtype = logits_TV.dtype
        # A target that no rank has makes the loss infinite, which stops the run: looking for one would cost a wait.
        losses_T: Tensor = (sum_T.log() - target_logit_T) / num_found_T
        return losses_T.where(target_T != -100, 0)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:
        probability_TV, row_T, is_here_T, target_T = ctx.saved_tensors
        gradient_T = gradient_T.where(target_T != -100, 0)
        gradient_TV = probability_TV * gradient_T[:, None]
        gradient_TV.scatter_add_(1, row_T[:, None], (-gradient_T * is_here_T)[:, None])
        return gradient_TV.to(ctx.dtype), None, None
