"""The head and the next-token loss in chunks of tokens: the logits of all tokens never exist.

Forward computes the loss of each chunk and, while its logits are there, the gradients of the hidden states and of the
head. Backward multiplies these by the gradient of the loss. To recompute each chunk's logits in backward instead would
hold no gradients between the two, but multiply by the head four times, not three
(docs/design/0018-loss-in-chunks.md). The losses of single tokens are recomputed so: a loss made of them, as that of
pairs, gives each token a gradient that is known only in backward.

Shapes: T tokens, D width, V this rank's shard of the vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.models.rope import at_least_float32
from meshwright.parallelism.collectives import all_reduce_max, all_reduce_sum
from meshwright.parallelism.head import SeparateHead


def _keep() -> None:
    """Do nothing: the weight stays as it is from forward to backward."""


class Chunking(NamedTuple):
    """How the loss is computed."""

    num_chunks: int
    tp_group: dist.ProcessGroup
    """The ranks that hold the other shards of the vocabulary, in order."""
    splits_backward: bool
    """Whether backward may run in two parts, which read the gradients of the head twice."""
    cross_entropy: Callable[[Tensor, Tensor, dist.ProcessGroup, float | Tensor], Tensor]
    """cross_entropy_, or that compiled."""
    unshard: Callable[[], object] = _keep
    """All-gathers the head's weight if FSDP2 has freed it; a collective then."""


def chunked_loss(hidden_TD: Tensor, head: SeparateHead, target_T: Tensor, chunking: Chunking) -> Tensor:
    """Return the sum of next-token losses divided by the number of targets; those of -100 add 0 and count."""
    loss: Tensor = _ChunkedLoss.apply(*_inputs(hidden_TD, head), target_T, chunking)  # type: ignore[no-untyped-call]
    return loss


def chunked_losses(hidden_TD: Tensor, head: SeparateHead, target_T: Tensor, chunking: Chunking) -> Tensor:
    """Return losses_T in nats; 0 for targets of -100."""
    losses_T: Tensor = _ChunkedLosses.apply(*_inputs(hidden_TD, head), target_T, chunking)  # type: ignore[no-untyped-call]
    return losses_T


def _inputs(hidden_TD: Tensor, head: SeparateHead) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias, which need gradients only where autograd is enabled.

    ctx.needs_input_grad is set by the tensors alone, also where it is disabled.
    """
    if torch.is_grad_enabled():
        return hidden_TD, head.weight_VD, head.bias_V
    return hidden_TD.detach(), head.weight_VD.detach(), None if head.bias_V is None else head.bias_V.detach()


def _chunks(num_tokens: int, num_chunks: int) -> Iterator[slice]:
    size = -(-num_tokens // num_chunks)
    return (slice(start, start + size) for start in range(0, num_tokens, size))


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
        gradients = _empty_gradients(ctx, hidden_TD, weight_VD, bias_V)
        scale, total = 1 / len(target_T), at_least_float32(hidden_TD.new_zeros(()))
        for rows in _chunks(len(hidden_TD), chunking.num_chunks):
            logits_CV = F.linear(hidden_TD[rows], weight_VD, bias_V)
            total += chunking.cross_entropy(logits_CV, target_T[rows], chunking.tp_group, scale).sum()
            _add(logits_CV, hidden_TD, weight_VD, gradients, rows)
            # Else the next chunk's lie next to them, and what the loss makes of those finds no gap as wide.
            del logits_CV
        ctx.gradients, ctx.is_multiplied = gradients, False
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


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        chunking: Chunking,
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T)
        ctx.chunking, ctx.gradients = chunking, None
        # The scale is of gradients, which are dropped: a compiled function would be compiled again for another one.
        scale, group = 1 / len(target_T), chunking.tp_group
        return torch.cat(
            [
                chunking.cross_entropy(F.linear(hidden_TD[rows], weight_VD, bias_V), target_T[rows], group, scale)
                for rows in _chunks(len(hidden_TD), chunking.num_chunks)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        chunking, gradients = ctx.chunking, ctx.gradients
        if gradients is None:
            # The backward of another microbatch may have freed the weight, and FSDP2 all-gathers it only with the
            # backward of the stage, which comes after this one.
            chunking.unshard()
            hidden_TD, weight_VD, bias_V, target_T = ctx.saved_tensors
            gradients = _empty_gradients(ctx, hidden_TD, weight_VD, bias_V)
            for rows in _chunks(len(hidden_TD), chunking.num_chunks):
                logits_CV = F.linear(hidden_TD[rows], weight_VD, bias_V)
                chunking.cross_entropy(logits_CV, target_T[rows], chunking.tp_group, gradient_T[rows])
                _add(logits_CV, hidden_TD, weight_VD, gradients, rows)
                del logits_CV
        # As above: the second part of a backward needs those of the head again.
        ctx.gradients = (None, *gradients[1:]) if chunking.splits_backward else None
        return (*gradients, None, None)


class _Gradients(NamedTuple):
    """Where gradients are added up; None for what needs none."""

    of_hidden_TD: Tensor | None
    of_weight_VD: Tensor | None
    of_bias_V: Tensor | None


def _empty_gradients(ctx: Any, *inputs: Tensor | None) -> _Gradients:
    """Return space for the gradients of hidden states, weight and bias."""
    return _Gradients(
        *(
            torch.empty_like(one) if one is not None and is_needed else None
            for one, is_needed in zip(inputs, ctx.needs_input_grad, strict=False)
        )
    )


def _add(gradient_CV: Tensor, hidden_TD: Tensor, weight_VD: Tensor, gradients: _Gradients, rows: slice) -> None:
    """Add what follows from the gradient of the logits of some tokens to `gradients`, which the first rows set."""
    beta = 1 if rows.start else 0
    if gradients.of_hidden_TD is not None:
        torch.mm(gradient_CV, weight_VD, out=gradients.of_hidden_TD[rows])
    if gradients.of_weight_VD is not None:
        gradients.of_weight_VD.addmm_(gradient_CV.T, hidden_TD[rows], beta=beta)
    if gradients.of_bias_V is not None:
        of_chunk_V = gradient_CV.sum(0)
        gradients.of_bias_V.copy_(gradients.of_bias_V + of_chunk_V if rows.start else of_chunk_V)


def cross_entropy_(logits_CV: Tensor, target_C: Tensor, group: dist.ProcessGroup, scale: float | Tensor) -> Tensor:
    """Return losses_C in nats, in float32 at least, 0 for targets of -100; `logits_CV` become the gradient of their
    sum times `scale`, in place, which may be one number for each token.

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
