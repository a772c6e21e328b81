"""The next-token loss in a form that torch.compile fuses well (layout.compile_loss), whole or in chunks of tokens.

The gradient of a logit is its probability times that of the loss, less the latter where the token is the target. Eager
code scatters the second part into the first; here each element compares its column with the target's, so that one
kernel reads the logits and writes their gradient. Backward recomputes probabilities: what a forward keeps are the
logits themselves and four numbers of each token.

Shapes: T tokens (C of a chunk), V this rank's shard of the vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.models.rope import at_least_float32
from meshwright.parallelism.collectives import all_reduce_max, all_reduce_sum


class _Tokens(NamedTuple):
    """What a loss knows of each token."""

    max_T: Tensor
    sum_T: Tensor
    """Sum over the vocabulary of the exponentials of logits less their maximum."""
    column_T: Tensor
    """Of the target in this rank's shard; -1 if it is in another one."""
    loss_T: Tensor
    """In nats; 0 for targets of -100."""


def fused_losses(logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return losses_T as `vocab_parallel_losses` does."""
    losses_T: Tensor = _FusedLosses.apply(logits_TV, target_T, group)  # type: ignore[no-untyped-call]
    return losses_T


def fused_cross_entropy_(
    logits_CV: Tensor, target_C: Tensor, group: dist.ProcessGroup, scale: float | Tensor
) -> Tensor:
    """Return losses_C, and put the gradient of their sum times `scale` in place of the logits, as `cross_entropy_`."""
    tokens = _tokens(logits_CV, target_C, group)
    counted_C = (target_C != -100).type_as(tokens.max_T) * scale
    logits_CV.copy_(_gradient(logits_CV, tokens, counted_C))
    return tokens.loss_T


class _FusedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        tokens = _tokens(logits_TV, target_T, group)
        ctx.save_for_backward(logits_TV, target_T, *tokens[:3])
        return tokens.loss_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, target_T, max_T, sum_T, column_T = ctx.saved_tensors
        tokens = _Tokens(max_T, sum_T, column_T, gradient_T)
        return _gradient(logits_TV, tokens, gradient_T.where(target_T != -100, 0)), None, None


def _tokens(logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> _Tokens:
    """Return what a loss knows of each token; a collective of `group`, whose ranks hold equal shards, in order."""
    wide_TV = at_least_float32(logits_TV)
    column_T = target_T - group.rank() * wide_TV.shape[1]
    is_here_T = (column_T >= 0) & (column_T < wide_TV.shape[1])
    max_T = all_reduce_max(wide_TV.amax(1), group)
    picked_T = wide_TV.gather(1, column_T.where(is_here_T, 0)[:, None])[:, 0]
    target_logit_T = (picked_T - max_T).where(is_here_T, 0)
    sums = torch.stack(((wide_TV - max_T[:, None]).exp().sum(1), target_logit_T, is_here_T.type_as(max_T)))
    sum_T, target_logit_T, num_found_T = all_reduce_sum(sums, group).unbind()
    # An out-of-range target makes the loss infinite, which stops the run.
    loss_T = ((sum_T.log() - target_logit_T) / num_found_T).where(target_T != -100, 0)
    return _Tokens(max_T, sum_T, column_T.where(is_here_T, -1), loss_T)


def _gradient(logits_TV: Tensor, tokens: _Tokens, of_loss_T: Tensor) -> Tensor:
    """Return the gradient of the logits, in their dtype, from that of each token's loss."""
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    # The exponentials of _tokens, to the bit, in other words: one value for both passes would be kept by the compiler,
    # in float32, where a collective stands between the two.
    exp_TV = (tokens.max_T[:, None] - at_least_float32(logits_TV)).neg().exp()
    is_target_TV = columns_V == tokens.column_T[:, None]
    of_target_TV = is_target_TV * of_loss_T[:, None]
    return (exp_TV * (of_loss_T / tokens.sum_T)[:, None] - of_target_TV).to(logits_TV.dtype)
