"""FSDP, HSDP and DDP inside of one graph: parameters that their modules read unsharded (layout.compile = "model").

A parameter is the same DTensor as under FSDP2, so checkpoints, optimizers and gradients see no difference. What its
module reads is computed from this rank's shard by operators that a compiler can trace:

    read       cast to precision.compute, all-gather over fsdp
    backward   cast to precision.reduce, reduce-scatter over fsdp, all-reduce over dp_replicate, cast back

This is the idea of SimpleFSDP (Zhang et al. 2024, arXiv:2411.00284), on functional collectives. FSDP2 frees gathered
parameters after forward; here the compiler recomputes the read, all-gather included, in backward.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from meshwright.models.contract import blocks_of
from meshwright.parallelism.activation_checkpoint import checkpoints_of
from meshwright.parallelism.collectives import all_gather_dim, all_reduce_sum, reduce_scatter_dim
from meshwright.parallelism.data.contiguous_parameters import make_contiguous
from meshwright.parallelism.data.fully_sharded import TORCH_DTYPES
from meshwright.parallelism.data.materialize import move_buffers
from meshwright.parallelism.expert.expert_parallel import expert_modules, expert_shard_dim
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.layers import ShardedModule, change_class
from meshwright.parallelism.torch_private.torch_fsdp import fsdp_placement
from meshwright.spec.job.sections import PrecisionSection


def shard_in_graph(model: nn.Module, precision: PrecisionSection, meshes: Meshes, *, sums_replicas: bool) -> None:
    """Shard the whole model in place; its modules read unsharded parameters.

    With `sums_replicas` each backward all-reduces gradients over dp_replicate, else that is left to the end of a step.
    """
    make_contiguous(model)
    shard = _Sharder(precision, meshes, sums_replicas=sums_replicas)
    blocks, layout = blocks_of(model), meshes.layout
    frees = {
        parameter
        for index, kind in checkpoints_of(blocks, layout)
        # The recomputation of a block that saves less than everything includes its reads.
        if layout.is_resharded and kind == "none"
        for parameter in blocks[index].parameters()
    }
    for module in list(model.modules()):
        shard(module, frees)
    move_buffers(model, meshes.device_type)
    cast_inputs(model, TORCH_DTYPES[precision.compute])


def gathered_elements(module: nn.Module) -> int:
    """Return the elements that this rank gathers of all parameters of `module`, with what pads them."""
    return sum(
        how.padded(cast(DTensor, part._parameters[name]).to_local().shape).numel()
        for part in module.modules()
        if isinstance(part, ShardedModule)
        for name, how in part.unshardings.items()
    )


class _Sharder:
    """Callable that shards the parameters of one module after another."""

    def __init__(self, precision: PrecisionSection, meshes: Meshes, *, sums_replicas: bool) -> None:
        compute, reduce = TORCH_DTYPES[precision.compute], TORCH_DTYPES[precision.reduce]
        self._compute, self._reduce = compute, compute if compute is torch.float64 else reduce
        self._meshes, self._degree = meshes, meshes.layout.fsdp
        self._group, self._tp_group = meshes.group("fsdp"), meshes.group("tp")
        has_replicas = sums_replicas and meshes.layout.dp_replicate > 1
        self._replicas = meshes.group("dp_replicate") if has_replicas else None
        self._placed: dict[nn.Parameter, _Placed] = {}

    def __call__(self, module: nn.Module, frees: set[nn.Parameter]) -> None:
        """Shard the parameters that `module` itself holds; those in `frees` are gathered again in backward."""
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        if not names:
            return
        if not isinstance(module, ShardedModule):
            change_class(module, ShardedModule, self._tp_group)
        unshardings: dict[str, Unsharding] = {}
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter not in self._placed:
                self._placed[parameter] = self._place(module, parameter, is_freed=parameter in frees)
            placed, unshardings[name] = self._placed[parameter]
            module._parameters[name] = placed
        module.unshardings = unshardings  # type: ignore[assignment]

    def _place(self, module: nn.Module, parameter: nn.Parameter, *, is_freed: bool) -> "_Placed":
        dim = expert_shard_dim(parameter, self._degree) if expert_modules(module) else 0
        of_tp = cast(DTensor, parameter.data) if isinstance(parameter, DTensor) else None
        whole = parameter.detach() if of_tp is None else of_tp.to_local()
        size, rank = whole.shape[dim], self._group.rank()
        rows = -(-size // self._degree)
        start = min(rank * rows, size)
        # A copy, so that the whole tensor of a model with weights is freed.
        local = whole.narrow(dim, start, min(rows, size - start)).clone(memory_format=torch.contiguous_format)
        local = local if local.is_meta else local.to(self._meshes.device_type)
        of_others = () if of_tp is None else of_tp.placements
        sizes = () if of_tp is None else of_tp.device_mesh.shape
        placements = (fsdp_placement(dim, [*zip(of_others, sizes, strict=True)]), *of_others)
        axes = ("fsdp", *(() if of_tp is None else of_tp.device_mesh.mesh_dim_names or ()))
        if self._meshes.layout.dp_replicate > 1:
            placements, axes = (Replicate(), *placements), ("dp_replicate", *axes)
        placed = DTensor.from_local(
            local, self._mesh(axes), placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        unsharding = Unsharding(
            self._group, self._replicas, dim, size, self._compute, self._reduce, is_freed and self._degree > 1
        )
        return nn.Parameter(placed, requires_grad=parameter.requires_grad), unsharding

    def _mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        mesh: DeviceMesh = self._meshes.dense[axes]
        return mesh


class Unsharding(NamedTuple):
    """How a shard becomes what a module reads."""

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """Ranks over which backward all-reduces the gradient."""
    dim: int
    size: int
    """Of the whole tensor along `dim`."""
    compute: torch.dtype
    reduce: torch.dtype
    is_freed: bool
    """Whether backward gathers again."""

    def padded(self, shape: torch.Size) -> torch.Size:
        """Return the shape of what is gathered of shards of `shape`, equal on all ranks."""
        rows = -(-self.size // self.group.size()) * self.group.size()
        return torch.Size([*shape[: self.dim], rows, *shape[self.dim + 1 :]])

    def __call__(self, shard: Tensor) -> Tensor:
        """Return the unsharded tensor, in the compute format."""
        if self.is_freed and torch.is_grad_enabled() and torch.compiler.is_compiling():
            again: Tensor = checkpoint(_unshard, shard, self, use_reentrant=False, preserve_rng_state=False)
            return again
        return _unshard(shard, self)


_Placed = tuple[nn.Parameter, Unsharding]


def _unshard(shard: Tensor, how: Unsharding) -> Tensor:
    whole: Tensor = _Unshard.apply(shard, *how[:6])  # type: ignore[no-untyped-call]
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, *how: Any) -> Tensor:
        group, replicas, dim, size, compute, reduce = how
        ctx.how, ctx.rows, ctx.dtype = (group, replicas, dim, reduce), shard.shape[dim], shard.dtype
        rows = -(-size // group.size())
        padded = _padded(shard.to(compute), dim, rows)
        gathered = all_gather_dim(padded, dim, group)
        return gathered if gathered.shape[dim] == size else gathered.narrow(dim, 0, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        group, replicas, dim, reduce = ctx.how
        rows = -(-gradient.shape[dim] // group.size())
        padded = _padded(gradient.to(reduce), dim, rows * group.size())
        reduced = reduce_scatter_dim(padded, dim, group)
        if replicas is not None:
            reduced = all_reduce_sum(reduced, replicas)
        own = reduced if reduced.shape[dim] == ctx.rows else reduced.narrow(dim, 0, ctx.rows)
        return own.to(ctx.dtype), *(None,) * 6


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return `tensor` with zeros at the end of `dim`, which is then `size` long."""
    missing = size - tensor.shape[dim]
    return F.pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, missing]) if missing else tensor


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the inputs in floating point of the model, and of blocks that do not ask for theirs as they are."""
    cast = partial(_with_cast_inputs, dtype=dtype)
    for module in _cast_modules(model):
        module.register_forward_pre_hook(cast, with_kwargs=True)


def _cast_modules(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    if getattr(model, "casts_block_inputs", True):
        yield from (block for block in blocks_of(model) if block is not None)


def _with_cast_inputs(_: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> tuple[Any, Any]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    found: tuple[Any, Any] = tree_map_only(Tensor, cast, (args, kwargs))
    return found
