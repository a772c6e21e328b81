"""Data parallelism by hand, and what is built on it: context and expert parallelism.

One block at a time: its weights are gathered, its part of the graph runs, its gradients are reduced. No hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.axis_overhead.collectives import all_gather_into, reduce_scatter_into
from benchmarks.axis_overhead.context_by_hand import gathered_attention, ring_attention, ulysses_attention
from benchmarks.axis_overhead.experts_by_hand import mixture, own_experts
from benchmarks.axis_overhead.plain_model import PlainModel, Seams
from benchmarks.axis_overhead.update import Update
from benchmarks.axis_overhead.workload import Step, Workload
from meshwright.data.loader import Microbatch
from meshwright.parallelism.context.context_parallel import sequence_indices
from meshwright.spec.layout.layout import ContextMethod

_ATTENTION: Mapping[ContextMethod, Callable[[int], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "all-gather": gathered_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}


class Unit:
    """Weights that travel together in one flat tensor, of which a rank keeps its part, or all (a replica)."""

    def __init__(self, weights: Mapping[str, Tensor], *, is_sharded: bool, own: Mapping[str, Tensor]) -> None:
        self._is_sharded = is_sharded
        num_ranks = dist.get_world_size()
        sizes = [weight.numel() for weight in weights.values()]
        self._padding = torch.zeros(-sum(sizes) % num_ranks)
        self._flat = torch.cat([*(weight.flatten() for weight in weights.values()), self._padding])
        self.kept = self._flat.chunk(num_ranks)[dist.get_rank()].clone() if is_sharded else self._flat
        # .data: writing what was gathered into the flat tensor is then no change of what autograd has saved.
        parts = self._flat.data[: sum(sizes)].split(sizes)
        self._travelling = {
            name: part.view(weight.shape).requires_grad_()
            for (name, weight), part in zip(weights.items(), parts, strict=True)
        }
        self.weights = {**self._travelling, **own}

    def gather(self) -> None:
        """Bring in the other ranks' parts."""
        if self._is_sharded:
            all_gather_into(self._flat, self.kept)

    def reduce(self) -> None:
        """Sum the gradients over ranks into that of what is kept."""
        gradients = [weight.grad.flatten() for weight in self._travelling.values() if weight.grad is not None]
        total = torch.cat([*gradients, self._padding])
        for weight in self._travelling.values():
            weight.grad = None
        if self._is_sharded:
            self.kept.grad = torch.empty_like(self.kept)
            reduce_scatter_into(self.kept.grad, total)
        else:
            dist.all_reduce(total)
            self.kept.grad = total


class _Sharded:
    def __init__(self, work: Workload) -> None:
        layout, rank = work.layout, dist.get_rank()
        self._positions_S = sequence_indices(work.job.train.seq_len, rank % layout.cp, layout.cp, layout.cp_method)
        seams = Seams(attend=_ATTENTION[layout.cp_method](rank)) if layout.cp > 1 else Seams()
        if layout.ep > 1:
            seams = Seams(feed=mixture)
        self._model = PlainModel(work.architecture, self._positions_S, seams)
        weights, is_sharded = work.whole_weights(), layout.dp_replicate == 1
        ends = {name: weight for name, weight in weights.items() if not name.startswith("blocks.")}
        self._root = Unit(ends, is_sharded=is_sharded, own={})
        self._blocks: list[Unit] = []
        owned: list[Tensor] = []
        for number in range(work.architecture.num_layers):
            prefix = f"blocks.{number}."
            of_block = {n.removeprefix(prefix): weight for n, weight in weights.items() if n.startswith(prefix)}
            own = own_experts(of_block) if layout.ep > 1 else {}
            shared = {name: weight for name, weight in of_block.items() if name not in own}
            self._blocks.append(Unit(shared, is_sharded=is_sharded, own=own))
            owned += own.values()
        units = [self._root, *self._blocks]
        num_copies = [1 if is_sharded else 2] * len(units) + [1] * len(owned)
        self._update = Update(work.job, [*(unit.kept for unit in units), *owned], num_copies)

    def __call__(self, microbatches: Sequence[Microbatch]) -> float:
        (microbatch,) = microbatches
        inputs, targets = microbatch.inputs[:, self._positions_S], microbatch.targets[:, self._positions_S]
        self._root.gather()
        x = embedded = self._model.embed(inputs, self._root.weights)
        passed = []
        for unit in self._blocks:
            unit.gather()
            start = x.detach().requires_grad_()
            x = self._model.block(start, unit.weights)
            passed.append((unit, start, x))
        start = x.detach().requires_grad_()
        loss = self._model.loss(start, targets, self._root.weights)
        loss.backward()
        for unit, earlier, end in reversed(passed):
            unit.gather()
            end.backward(start.grad)
            unit.reduce()
            start = earlier
        embedded.backward(start.grad)
        self._root.reduce()
        return self._update(loss / dist.get_world_size(), num_summed=dist.get_world_size())


def build(work: Workload) -> Step:
    """Return the step of dp_shard, dp_replicate, cp or ep."""
    return _Sharded(work)
