"""Tensor and sequence parallelism by hand: plain parts of weights, and the vocabulary shared too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from benchmarks.axis_overhead.collectives import gather_sequence, scatter_sequence
from benchmarks.axis_overhead.plain_model import PlainModel, Seams
from benchmarks.axis_overhead.update import Update
from benchmarks.axis_overhead.workload import Step, Workload
from meshwright.data.loader import Microbatch

_ROW_SPLIT = ("attention.output.weight", "ffn.down.weight")


class _Tensor:
    def __init__(self, work: Workload) -> None:
        self._weights = {name: _part(name, weight) for name, weight in work.whole_weights().items()}
        self._whole = [weight for name, weight in self._weights.items() if name.endswith("norm.weight")]
        seams = Seams(look_up=_look_up, loss=_loss, enter=gather_sequence, leave=scatter_sequence)
        self._model = PlainModel(work.architecture, torch.arange(work.job.train.seq_len), seams)
        self._blocks = [
            {name.removeprefix(prefix): weight for name, weight in self._weights.items() if name.startswith(prefix)}
            for prefix in (f"blocks.{number}." for number in range(work.architecture.num_layers))
        ]
        num_copies = [2 if name.endswith("norm.weight") else 1 for name in self._weights]
        self._update = Update(work.job, list(self._weights.values()), num_copies)

    def __call__(self, microbatches: Sequence[Microbatch]) -> float:
        (microbatch,) = microbatches
        x_BSD = self._model.embed(microbatch.inputs, self._weights)
        for weights in self._blocks:
            x_BSD = self._model.block(x_BSD, weights)
        loss = self._model.loss(x_BSD, microbatch.targets, self._weights)
        loss.backward()
        flat = torch.cat([weight.grad for weight in self._whole if weight.grad is not None])
        dist.all_reduce(flat)
        for weight, total in zip(self._whole, flat.chunk(len(self._whole)), strict=True):
            weight.grad = total
        return self._update(loss / dist.get_world_size(), num_summed=1)


def _part(name: str, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        weight = weight.chunk(dist.get_world_size(), 1 if name.endswith(_ROW_SPLIT) else 0)[dist.get_rank()]
    return weight.clone().requires_grad_()


def _look_up(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    row_BS = tokens_BS - dist.get_rank() * weight_VD.shape[0]
    is_elsewhere_BS = (row_BS < 0) | (row_BS >= weight_VD.shape[0])
    x_BSD = F.embedding(row_BS.masked_fill(is_elsewhere_BS, 0), weight_VD)
    return scatter_sequence(x_BSD.masked_fill(is_elsewhere_BS[..., None], 0.0))


def _loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    loss: Tensor = _SharedLoss.apply(logits_BSV.flatten(0, 1), targets_BS.flatten())  # type: ignore[no-untyped-call]
    return loss


class _SharedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        row_T = target_T - dist.get_rank() * logits_TV.shape[1]
        is_here_T = (row_T >= 0) & (row_T < logits_TV.shape[1])
        row_T = row_T.where(is_here_T, 0)
        max_T = logits_TV.amax(1)
        dist.all_reduce(max_T, dist.ReduceOp.MAX)
        shifted_TV = logits_TV - max_T[:, None]
        target_logit_T = shifted_TV.gather(1, row_T[:, None])[:, 0].where(is_here_T, 0)
        probability_TV = shifted_TV.exp_()
        sums = torch.stack((probability_TV.sum(1), target_logit_T))
        dist.all_reduce(sums)
        ctx.save_for_backward(probability_TV, sums[0], row_T, is_here_T)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probability_TV, sum_T, row_T, is_here_T = ctx.saved_tensors
        each = gradient / len(row_T)
        gradient_TV = probability_TV * (each / sum_T)[:, None]
        gradient_TV.scatter_add_(1, row_T[:, None], (-each * is_here_T)[:, None])
        return gradient_TV, None


def build(work: Workload) -> Step:
    """Return the step of tp."""
    return _Tensor(work)
