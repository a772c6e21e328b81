"""A pipeline of two stages by hand: 1F1B, as rank 0 and rank 1 would write it down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.axis_overhead.plain_model import PlainModel, Seams
from benchmarks.axis_overhead.update import Update
from benchmarks.axis_overhead.workload import Step, Workload
from meshwright.data.loader import Microbatch

_FIRST_PARTS = ("embedding.",)
_LAST_PARTS = ("norm.", "head.")


class _Stage:
    def __init__(self, work: Workload) -> None:
        assert work.layout.stage_boundaries is not None
        (boundary,) = work.layout.stage_boundaries
        self._is_first = dist.get_rank() == 0
        blocks = range(boundary) if self._is_first else range(boundary, work.architecture.num_layers)
        prefixes = [f"blocks.{number}." for number in blocks]
        kept = (*prefixes, *(_FIRST_PARTS if self._is_first else _LAST_PARTS))
        self._weights = {
            name: weight.requires_grad_() for name, weight in work.whole_weights().items() if name.startswith(kept)
        }
        self._blocks = [
            {name.removeprefix(prefix): weight for name, weight in self._weights.items() if name.startswith(prefix)}
            for prefix in prefixes
        ]
        self._model = PlainModel(work.architecture, torch.arange(work.job.train.seq_len), Seams())
        self._dim = work.architecture.dim
        self._update = Update(work.job, list(self._weights.values()), [1] * len(self._weights))

    def __call__(self, microbatches: Sequence[Microbatch]) -> float:
        arriving = [torch.empty(*one.inputs.shape, self._dim) for one in microbatches]
        works: list[Any] = [dist.irecv(tensor, 1 - dist.get_rank()) for tensor in arriving]
        sent: list[tuple[dist.Work, Tensor]] = []
        total = torch.zeros(())
        ends: list[Tensor] = []
        for number, one in enumerate(microbatches):
            if self._is_first:
                ends.append(self._through_blocks(self._model.embed(one.inputs, self._weights)))
                sent.append(_send(ends[-1].detach()))
                if number > 0:
                    works[number - 1].wait()
                    ends[number - 1].backward(arriving[number - 1])
            else:
                works[number].wait()
                start = arriving[number].requires_grad_()
                loss = self._model.loss(self._through_blocks(start), one.targets, self._weights)
                loss.backward()
                sent.append(_send(start.grad))
                total += loss.detach()
        if self._is_first:
            works[-1].wait()
            ends[-1].backward(arriving[-1])
        for work, _ in sent:
            work.wait()
        return self._update(total / len(microbatches), num_summed=len(microbatches))

    def _through_blocks(self, x_BSD: Tensor) -> Tensor:
        for weights in self._blocks:
            x_BSD = self._model.block(x_BSD, weights)
        return x_BSD


def _send(tensor: Tensor | None) -> tuple[dist.Work, Tensor]:
    """Return what to wait for, and the tensor, which must live until then."""
    assert tensor is not None
    tensor = tensor.contiguous()
    work = dist.isend(tensor, 1 - dist.get_rank())
    assert work is not None
    return work, tensor


def build(work: Workload) -> Step:
    """Return the step of pp."""
    return _Stage(work)
