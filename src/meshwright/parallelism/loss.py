"""make_loss(model, meshes): what one rank takes the gradient of; the mean over ranks that share samples is the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.contract import Loss, loss_of, next_token_loss
from meshwright.parallelism.collectives import all_gather_dim, all_reduce_sum
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.vocabulary import vocabulary_parallel_losses


def make_loss(model: nn.Module, meshes: Meshes) -> Loss:
    """Return loss(output, targets) of what this rank computes: equal on all of tp, and its mean over cp is the loss.

    A model's own loss gets whole logits, of this rank's part of the sequence.
    """
    loss = loss_of(model)
    if meshes.layout.tp == meshes.layout.cp == 1:
        return loss
    if loss is next_token_loss:
        return _SharedNextTokenLoss(meshes.group("tp"), meshes.group("cp"))
    return loss if meshes.layout.tp == 1 else _OfWholeLogits(loss, meshes.group("tp"))


class _SharedNextTokenLoss:
    """Callable: next_token_loss where tp_group shares the vocabulary of the logits, and cp_group the sequence.

    Parts of a sequence can hold unequal numbers of targets that count, so a mean of means would not be the mean.
    """

    def __init__(self, tp_group: dist.ProcessGroup, cp_group: dist.ProcessGroup) -> None:
        self._tp_group, self._cp_group = tp_group, cp_group

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return this rank's sum over the mean number of targets of the ranks that share the sequence."""
        if self._tp_group.size() == 1:
            total = next_token_loss(output_BSV, targets_BS, reduction="sum")
        else:
            total = vocabulary_parallel_losses(output_BSV, targets_BS, self._tp_group).sum()
        num_targets = all_reduce_sum((targets_BS != -100).sum().type_as(total), self._cp_group)
        return total * self._cp_group.size() / num_targets


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
