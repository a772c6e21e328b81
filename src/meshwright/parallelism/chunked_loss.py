"""The head and the next-token loss in chunks of tokens: the logits of all tokens never exist.

Forward computes the loss of each chunk and, while its logits are there, the gradients of the hidden states and of the
head. Backward multiplies these by the gradient of the loss. To recompute each chunk's logits in backward instead would
hold no gradients between the two, but multiply by the head four times, not three
(docs/design/0018-loss-in-chunks.md).

Shapes: T tokens, D width, V this rank's shard of the vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.models.rope import at_least_float32
from meshwright.parallelism.collectives import all_reduce_max, all_reduce_sum
from meshwright.parallelism.head import SeparateHead


class Chunking(NamedTuple):
    """How the loss is computed."""

    num_chunks: int
    tp_group: dist.ProcessGroup
    """The ranks that hold the other shards of the vocabulary, in order."""
    splits_backward: bool
    """Whether backward may run in two parts, which read the gradients of the head twice."""
    cross_entropy: Callable[[Tensor, Tensor, dist.ProcessGroup, float], Tensor]
    """cross_entropy_, or that compiled."""


def chunked_loss(hidden_TD: Tensor, head: SeparateHead, target_T: Tensor, chunking: Chunking) -> Tensor:
    """Return the sum of next-token losses divided by the number of targets; those of -100 add 0 and count."""
    inputs = hidden_TD, head.weight_VD, head.bias_V
    if not torch.is_grad_enabled():
        # ctx.needs_input_grad is set by the tensors alone, also where autograd is disabled.
        inputs = hidden_TD.detach(), head.weight_VD.detach(), None if head.bias_V is None else head.bias_V.detach()
    loss: Tensor = _ChunkedLoss.apply(*inputs, target_T, chunking)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def chunked_losses(hidden_TD: Tensor, head: SeparateHead, target_T: Tensor, chunking: Chunking) -> Tensor:
    """Return losses_T in nats; 0 for targets of -100."""
    # The scale is of gradients, which are dropped: a compiled function would be compiled again for another one.
    size, scale = -(-len(hidden_TD) // chunking.num_chunks), 1 / len(target_T)
    return torch.cat(
        [
            chunking.cross_entropy(F.linear(hidden_CD, head.weight_VD, head.bias_V), target_C, chunking.tp_group, scale)
            for hidden_CD, target_C in zip(hidden_TD.split(size), target_T.split(size), strict=True)
        ]
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        chunking: Chunking,
    ) -> Tensor:
        of_hidden, of_weight, of_bias = (
            torch.empty_like(one) if one is not None and is_needed else None
            for one, is_needed in zip((hidden_TD, weight_VD, bias_V), ctx.needs_input_grad, strict=False)
        )
        scale, total = 1 / len(target_T), at_least_float32(hidden_TD.new_zeros(()))
        starts = range(0, len(hidden_TD), -(-len(hidden_TD) // chunking.num_chunks))
        for start in starts:
            rows = slice(start, start + starts.step)
            of_chunk = None if of_hidden is None else of_hidden[rows]
            sums = _Sums(of_chunk, of_weight, of_bias, start == 0)
            logits_CV = F.linear(hidden_TD[rows], weight_VD, bias_V)
            total += chunking.cross_entropy(logits_CV, target_T[rows], chunking.tp_group, scale).sum()
            _add(logits_CV, hidden_TD[rows], weight_VD, sums)
            # Else the next chunk's lie next to them, and what the loss makes of those finds no gap as wide.
            del logits_CV
        ctx.gradients, ctx.is_multiplied = (of_hidden, of_weight, of_bias), False
        ctx.splits_backward = chunking.splits_backward
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if not ctx.is_multiplied:
            for one in gradients:
                if one is not None:
                    one.mul_(gradient)
        # The second part of a backward needs those of the head again. Otherwise nothing may hold them: autograd copies
        # a gradient that others refer to.
        ctx.gradients = (None, *gradients[1:]) if ctx.splits_backward else None
        ctx.is_multiplied = True
        return (*gradients, None, None)


class _Sums(NamedTuple):
    """Where gradients are added up; None for what needs none."""

    of_hidden_CD: Tensor | None
    """Of the chunk alone."""
    of_weight_VD: Tensor | None
    of_bias_V: Tensor | None
    is_first: bool
    """Whether the sums of the head are not set yet."""


def _add(gradient_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, sums: _Sums) -> None:
    """Add what follows from the gradient of a chunk's logits to `sums`."""
    beta = 0 if sums.is_first else 1
    if sums.of_hidden_CD is not None:
        torch.mm(gradient_CV, weight_VD, out=sums.of_hidden_CD)
    if sums.of_weight_VD is not None:
        sums.of_weight_VD.addmm_(gradient_CV.T, hidden_CD, beta=beta)
    if sums.of_bias_V is not None:
        of_chunk_V = gradient_CV.sum(0)
        sums.of_bias_V.copy_(of_chunk_V if sums.is_first else sums.of_bias_V + of_chunk_V)


def cross_entropy_(logits_CV: Tensor, target_C: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
    """Return losses_C in nats, in float32 at least, 0 for targets of -100; `logits_CV` become the gradient of their
    sum times `scale`, in place.

    The ranks of `group` hold equal shards of the vocabulary, in order; no rank holds whole rows.
    """
    is_wide = logits_CV.dtype in (torch.float32, torch.float64)
    row_C = target_C - group.rank() * logits_CV.shape[1]
    is_here_C = (row_C >= 0) & (row_C < logits_CV.shape[1])
    row_C = row_C.where(is_here_C, 0)[:, None]
    max_C = all_reduce_max(at_least_float32(logits_CV.amax(1)), group)
    target_logit_C = (at_least_float32(logits_CV.gather(1, row_C)[:, 0]) - max_C).where(is_here_C, 0)
    exp_CV = (logits_CV.sub_(max_C[:, None]) if is_wide else logits_CV - max_C[:, None]).exp_()
    sums = torch.stack((exp_CV.sum(1), target_logit_C, is_here_C.type_as(max_C)))
    sum_C, target_logit_C, num_found_C = all_reduce_sum(sums, group)
    counted_C = (target_C != -100).type_as(max_C) * scale
    exp_CV.mul_((counted_C / sum_C)[:, None])
    exp_CV.scatter_add_(1, row_C, (-counted_C * is_here_C)[:, None])
    if not is_wide:
        logits_CV.copy_(exp_CV)
    # An out-of-range target makes the loss infinite, which stops the run; checking would cost a device sync.
    losses_C: Tensor = (sum_C.log() - target_logit_C) / num_found_C
    return losses_C.where(target_C != -100, 0)
