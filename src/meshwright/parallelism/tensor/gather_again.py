"""Backward all-gathers again what tensor-parallel ranks gathered in forward, of which each keeps its shard.

A column-parallel matmul needs its whole input for the gradient of its weight. Kept whole, it would take tp times the
memory of all that stands between matmuls; Megatron-LM's sequence parallelism keeps the shard for the same reason
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from meshwright.parallelism.collectives import gather, start_all_gather


class _View(NamedTuple):
    """Where a saved tensor lies in the gathered one."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatherAgain:
    """One gathered input of column-parallel matmuls, for eager code: backward has one all-gather for all that save it.

    Its result is freed after the last of them has used it.
    """

    def __init__(self, shard: Tensor, dim: int, group: dist.ProcessGroup) -> None:
        self._shard, self._dim, self._group = shard, dim, group
        self._storage = 0
        self._num_saved = self._num_unused = 0
        self._wait: Callable[[], Tensor] | None = None
        self._again: Tensor | None = None

    @contextmanager
    def gathered(self) -> Iterator[Tensor]:
        """Yield the gathered tensor; what autograd saves of it within the context is the shard."""
        gathered = gather(self._shard, self._dim, self._group)
        self._shard, self._storage = self._shard.detach(), gathered.untyped_storage()._cdata
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield gathered

    def start_after(self, output: Any) -> None:
        """Start the all-gather right behind the backward of `output`, so that later gradients hide it."""
        node = getattr(output, "grad_fn", None)
        if node is not None:
            node.register_hook(lambda *_: self._start())

    def _pack(self, saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage()._cdata != self._storage:
            # An output that held itself would never be freed.
            return saved.detach()
        self._num_saved += 1
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._again is None:
            self._start()
            assert self._wait is not None
            self._again, self._wait, self._num_unused = self._wait(), None, self._num_saved
        view = self._again.as_strided(*saved)
        self._num_unused -= 1
        if self._num_unused == 0:
            self._again = None
        return view

    def _start(self) -> None:
        if self._num_saved and self._wait is None and self._again is None:
            self._wait = start_all_gather(self._shard, self._dim, self._group)


def gather_compiled(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the gathered tensor, which the compiler has to recompute, and so to gather again, in backward."""
    gathered: Tensor = checkpoint(gather, shard, dim, group, use_reentrant=False, preserve_rng_state=False)
    return gathered
