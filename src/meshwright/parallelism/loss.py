"""make_loss(model, meshes): what one rank takes the gradient of; the mean over ranks that share samples is the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.contract import Loss, loss_of, next_token_loss
from meshwright.parallelism.collectives import all_gather_dim
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.vocabulary import vocabulary_parallel_losses


def make_loss(model: nn.Module, meshes: Meshes) -> Loss:
    """Return loss(output, targets) of what this rank computes: equal on all of tp, and its mean over cp is the loss.

    A model's own loss gets whole logits, of this rank's part of the sequence.
    """
    loss = loss_of(model)
    if loss is next_token_loss:
        return NextTokenLoss(meshes.group("tp"))
    return loss if meshes.layout.tp == 1 else _OfWholeLogits(loss, meshes.group("tp"))


class NextTokenLoss:
    """Callable: the sum of the next-token losses over the number of targets, where tp_group shares the vocabulary.

    Targets of -100 add nothing to the sum but count in the number, so that microbatches and parts of a sequence may
    hold unequal numbers of targets that count: divided by `counted_share`, it is the mean over those of the step. A
    mean of each microbatch would weigh a target by how many others its microbatch holds, which depends on the layout.
    """

    def __init__(self, tp_group: dist.ProcessGroup) -> None:
        self._tp_group = tp_group

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss of this rank's part of the sequence."""
        if self._tp_group.size() == 1:
            total = next_token_loss(output_BSV, targets_BS, reduction="sum")
        else:
            total = vocabulary_parallel_losses(output_BSV, targets_BS, self._tp_group).sum()
        return total / targets_BS.numel()


def counted_share(targets: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return which share of a step's targets, of all ranks, are not -100: a float64 scalar; a collective.

    `targets` are those of this rank's microbatches, of whole sequences. Ranks that share samples count them alike.
    """
    counts = [((one != -100).sum().item(), one.numel()) for one in targets]
    totals = torch.tensor(counts, dtype=torch.float64).sum(0).to(device)
    dist.all_reduce(totals)
    return totals[0] / totals[1]


class _OfWholeLogits:
    """Callable: a model's own loss, which knows nothing of shares of the vocabulary."""

    def __init__(self, loss: Loss, tp_group: dist.ProcessGroup) -> None:
        self._loss, self._tp_group = loss, tp_group

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss, computed by every rank alike."""
        whole_BSV: Tensor = _Whole.apply(output_BSV, self._tp_group)  # type: ignore[no-untyped-call]
        return self._loss(whole_BSV, targets_BS)


class _Whole(torch.autograd.Function):
    """Joins the last dim; all ranks do the same with the whole, so each keeps its part of the gradient, unsummed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_dim(x, -1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None
