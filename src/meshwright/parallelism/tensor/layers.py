"""Tensor- and sequence-parallel layers: mixins that are put before a module's own class.

Shapes: B batch, S positions, D width, V this rank's rows of the vocabulary.

A column-parallel matmul needs its whole input for the gradient of its weight. Saved whole, that input would take tp
times the memory of all other activations, so a rank saves its shard and backward repeats the all-gather, as in
Megatron-LM's sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshwright.parallelism.collectives import (
    all_gather_autograd,
    all_reduce_sum,
    reduce_scatter_autograd,
    start_all_gather,
)
from meshwright.parallelism.saved_tensors import BlockActivations
from meshwright.parallelism.torch_private.torch_dispatch import storage_identity
from meshwright.spec.step.adapter import LORA_A


class ShardedModule(nn.Module):
    """Module whose parameters are DTensors, and read as this rank's shards: plain tensors."""

    tp_group: dist.ProcessGroup
    """The ranks that hold the other shards."""
    unshardings: Mapping[str, Any] = MappingProxyType({})
    """What makes of a data-parallel shard what the module reads; without FSDP2 only (graph/graph_sharded.py)."""

    def local_shard(self, name: str) -> Tensor:
        """Return what `self.<name>` reads as."""
        shard: Tensor = cast(DTensor, self._parameters[name]).to_local()
        return self.unshardings[name](shard) if name in self.unshardings else shard


class AllGatherInput(ShardedModule):
    """Module that takes a shard of the sequence as its first input and computes on the whole sequence."""

    regathers_input = False
    """Whether backward repeats the all-gather. False in a recomputed block, whose recomputation includes it."""

    def forward(self, x_BSD: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole sequence."""
        if not self.regathers_input or not torch.is_grad_enabled():
            return super().forward(all_gather_autograd(x_BSD, 1, self.tp_group), *args, **kwargs)
        if torch.compiler.is_compiling():
            return super().forward(_recomputed_all_gather(x_BSD, 1, self.tp_group), *args, **kwargs)
        regather = _RegatheredInput(x_BSD, 1, self.tp_group)
        with regather.gathered() as gathered_BSD:
            output = super().forward(gathered_BSD, *args, **kwargs)
        regather.start_after(output)
        return output


class AllGatherOutput(ShardedModule):
    """Module that computes on a shard of the sequence and returns the whole sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole sequence."""
        return all_gather_autograd(super().forward(*args, **kwargs), 1, self.tp_group)


class RowwiseLinearPartial(ShardedModule):
    """Linear layer sharded by input features, whose output is a partial sum."""

    def local_shard(self, name: str) -> Tensor:
        """Return the shard of the weight, or the bias divided by the number of ranks, which all add it."""
        shard = super().local_shard(name)
        return shard / self.tp_group.size() if name == "bias" else shard

    def whole_rows(self, sums_O: Tensor) -> Tensor:
        """Return sums over all inputs from those over this rank's, for the norms of rows (models/adapted_linear.py)."""
        return all_reduce_sum(sums_O, self.tp_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's partial sum."""
        if torch.compiler.is_compiling():
            # The compiler saves no partial sum whose reduced result is saved.
            return super().forward(*args, **kwargs)
        with partial_sum_matmuls():
            return super().forward(*args, **kwargs)


class ReduceScatterOutput(ShardedModule):
    """Module whose output is a partial sum, reduce-scattered along the sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shard of the sequence, summed over ranks."""
        return reduce_scatter_autograd(super().forward(*args, **kwargs), 1, self.tp_group)


class RowwiseLinear(ReduceScatterOutput, RowwiseLinearPartial):
    """Linear layer sharded by input features; its output is reduce-scattered along the sequence."""


class AllGatherInputReduceScatterOutput(AllGatherInput, ReduceScatterOutput):
    """Module that takes a shard of the sequence, computes a partial sum for the whole, and returns a shard of it."""


class SharedHeadLinear(ShardedModule):
    """Key or value projection of fewer heads than ranks: a rank stores a part of one head and computes the whole."""

    head_group: dist.ProcessGroup
    """The ranks that share the head."""

    def local_shard(self, name: str) -> Tensor:
        """Return the whole head; backward reduce-scatters its gradient over the ranks that share it."""
        shard = super().local_shard(name)
        return shard if name == LORA_A else all_gather_autograd(shard, 0, self.head_group)


class VocabParallelEmbedding(ShardedModule):
    """Embedding sharded by rows: a token of another rank's rows gives 0 here."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return x_BSD of this rank's shard of the sequence."""
        weight_VD = self.local_shard("weight")
        num_rows = weight_VD.shape[0]
        row_BS = tokens_BS - self.tp_group.rank() * num_rows
        is_elsewhere_BS = (row_BS < 0) | (row_BS >= num_rows)
        x_BSD = F.embedding(row_BS.masked_fill(is_elsewhere_BS, 0), weight_VD)
        return reduce_scatter_autograd(x_BSD.masked_fill(is_elsewhere_BS[..., None], 0.0), 1, self.tp_group)


def change_class(module: nn.Module, layer: type[ShardedModule], tp_group: dist.ProcessGroup) -> None:
    """Put `layer` before the class of `module`, in place."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    module.__class__ = _joined(layer, type(module), names)  # type: ignore[arg-type]
    module.tp_group = tp_group  # type: ignore[assignment]


@functools.cache
def _joined(layer: type[ShardedModule], own: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # Cached: with a new class for each block torch.compile would compile each block again.
    properties = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(f"{layer.__name__}{own.__name__}", (layer, own), properties)


def _read(module: ShardedModule, name: str) -> Tensor | None:
    parameter = module._parameters[name]
    # Between forwards FSDP2 registers its own shards under the same name and reads them from there.
    return parameter if _is_fsdp_sharded(parameter) and not module.unshardings else module.local_shard(name)


def _is_fsdp_sharded(parameter: Tensor | None) -> bool:
    axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return bool(axes) and not {"fsdp", "expert_dp_shard"}.isdisjoint(axes or ())


class _View(NamedTuple):
    """A saved tensor as a view of the gathered one."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _RegatheredInput:
    """All-gathered input of column-parallel matmuls in eager code, saved as its shard.

    Backward all-gathers once for all the ops that saved it, and frees the result after the last. What is saved besides
    goes to the block that runs, which may keep it on the host (saved_tensors.py).
    """

    def __init__(self, shard: Tensor, dim: int, group: dist.ProcessGroup) -> None:
        self._input, self._dim, self._group = shard, dim, group
        self._block = BlockActivations.of_running_block()
        self._shard: Any = None
        """The detached input, as it is kept for backward."""
        self._storage = 0
        self._num_saved = self._num_unused = 0
        self._wait: Callable[[], Tensor] | None = None
        self._regathered: Tensor | None = None

    @contextmanager
    def gathered(self) -> Iterator[Tensor]:
        """Yield the gathered tensor; within the context autograd saves the shard in its place."""
        gathered = all_gather_autograd(self._input, self._dim, self._group)
        self._shard, self._storage = self._kept(self._input), storage_identity(gathered)
        del self._input
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield gathered

    def start_after(self, output: Any) -> None:
        """Start the all-gather right after the backward of `output`, to overlap with the next gradients."""
        node = getattr(output, "grad_fn", None)
        if node is not None:
            node.register_hook(lambda *_: self._start())

    def _kept(self, tensor: Tensor) -> Any:
        """Return what to keep of a tensor. Detached: an output saved by its own node would be a reference cycle."""
        return tensor.detach() if self._block is None else self._block.pack(tensor.detach())

    def _read(self, kept: Any) -> Tensor:
        return kept if self._block is None else self._block.unpack(kept)

    def _pack(self, saved: Tensor) -> Any:
        if storage_identity(saved) != self._storage:
            return self._kept(saved)
        self._num_saved += 1
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return self._read(saved)
        if self._regathered is None:
            self._start()
            assert self._wait is not None
            self._regathered, self._wait, self._num_unused = self._wait(), None, self._num_saved
        view = self._regathered.as_strided(*saved)
        self._num_unused -= 1
        if self._num_unused == 0:
            self._regathered = None
        return view

    def _start(self) -> None:
        if self._num_saved and self._wait is None and self._regathered is None:
            self._wait = start_all_gather(self._read(self._shard), self._dim, self._group)


def _recomputed_all_gather(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the gathered tensor; compiled code must recompute it in backward, all-gather included."""
    gathered: Tensor = checkpoint(all_gather_autograd, shard, dim, group, use_reentrant=False, preserve_rng_state=False)
    return gathered


_is_partial_sum = ContextVar("is_partial_sum", default=False)


@contextmanager
def partial_sum_matmuls() -> Iterator[None]:
    """Mark the matmuls within the context as partial sums; eager code only."""
    token = _is_partial_sum.set(True)
    try:
        yield
    finally:
        _is_partial_sum.reset(token)


def is_partial_sum() -> bool:
    """Return whether a matmul here is one of a row-parallel layer."""
    return _is_partial_sum.get()
