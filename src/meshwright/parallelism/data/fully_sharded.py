"""FSDP2, HSDP and DDP: sharding of parameters, gradients and optimizer state over data-parallel ranks.

DDP is HSDP with whole shards: each rank keeps all parameters, and gradients are summed over dp_replicate only. Every
reduction sums; one division at the end of the step makes the mean over all axes. On a processor replica_sums.py takes
the place of FSDP2 where it would neither shard nor cast.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.errors import UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.parallelism.data.contiguous_parameters import make_contiguous
from meshwright.parallelism.expert.expert_parallel import expert_modules, expert_shard_dim, have_own_ranks
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_fsdp import (
    backward_in_parts,
    end_backward,
    end_gradient_reduction,
    hide_from_selective_checkpoint,
    holds_partial_sums,
    overlap_reductions,
    separate_reductions,
    start_unshard,
)
from meshwright.parallelism.torch_private.torch_nccl import meshes_limited_like
from meshwright.spec.job.sections import DType, PrecisionSection
from meshwright.spec.layout.layout import Layout

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def shard_model(model: nn.Module, layout: Layout, precision: PrecisionSection, meshes: Meshes) -> None:
    """Shard one stage in place: experts, each block, then the rest. On one rank too, for mixed precision."""
    make_contiguous(model)
    casts = getattr(model, "casts_block_inputs", True)
    block_policy, root_policy = (_mixed_precision(precision, casts_inputs=cast) for cast in (casts, True))
    shard = partial(fully_shard, offload_policy=_offload_policy(layout, meshes.device_type))
    blocks = [block for block in blocks_of(model) if block is not None]
    # Otherwise the sum over microbatches of what float64 reduces would be rounded to float32 after each.
    keeps_sums = precision.reduce == "float64" != precision.compute
    mesh = meshes.sharding("fsdp", keeps_sums=keeps_sums)
    for block in blocks:
        _shard_experts(block, partial(shard, mp_policy=block_policy), meshes)
        reshard = _reshard_after_forward(layout, layout.fsdp)
        # Partial resharding needs parameters sharded along dim 0 (torch 2.13).
        place = _placement_of_experts(block, layout.fsdp) if isinstance(reshard, bool) else None
        with meshes_limited_like(meshes.group("fsdp")):
            shard(block, mesh=mesh, mp_policy=block_policy, reshard_after_forward=reshard, shard_placement_fn=place)
    # Backward starts with the root's own parameters (embedding, head).
    shard(model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        # Otherwise a divide factor is a PREMUL_SUM reduction, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)
    assert isinstance(model, FSDPModule)
    if layout.separate_reduce_group:
        separate_reductions(_units(model))
    units = [_units(block) for block in blocks]
    overlap_reductions(model, max(map(len, units), default=1))
    _prefetch(model, units, layout.prefetch)


def is_one_graph(model: nn.Module) -> bool:
    """Return whether a stage gathers parameters and reduces gradients in its own graph (graph/graph_sharded.py).

    What says when FSDP2 does so has no effect on it.
    """
    return not isinstance(model, FSDPModule)


def set_gradient_sync(model: nn.Module, layout: Layout, *, reduces: bool, is_last: bool, waits: bool) -> None:
    """Set how the next backward passes of a stage reduce gradients.

    With `reduces` they reduce-scatter, else they accumulate unsharded gradients on this rank. The last backward of a
    step also all-reduces the shards over replicas and reshards parameters that forward kept. With `waits` a backward
    waits for its reductions, else `await_gradients` does.
    """
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduces)
    model.set_requires_all_reduce(reduces and is_last)
    model.set_is_last_backward(waits)
    model.set_reshard_after_backward(is_last or bool(_reshard_after_forward(layout, layout.fsdp)))
    for experts in expert_modules(model) if have_own_ranks(layout) else ():
        assert isinstance(experts, FSDPModule)
        experts.set_reshard_after_backward(is_last or bool(_reshard_after_forward(layout, layout.expert_dp_shard)))


def gradients_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Keep the gradients of backward passes inside for `accumulate_gradients` or `reduce_gradients`."""
    assert isinstance(model, FSDPModule)
    return backward_in_parts(model)


def accumulate_gradients(model: nn.Module) -> None:
    """Add the gradients of a stage's last backward to their sum over microbatches, in the reduction dtype.

    FSDP2's hooks do so in a backward to the inputs. Gradients of a backward to the weights would accumulate in the
    parameters' dtype until the next backward to the inputs.
    """
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    end_backward(model)


def reduce_gradients(model: nn.Module, layout: Layout, *, is_last: bool) -> None:
    """Start to reduce the gradients that a stage's backward passes accumulated on this rank; a collective.

    The last reduction of a step reshards parameters; gradients are sharded after `await_gradients`.
    """
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    set_gradient_sync(model, layout, reduces=True, is_last=is_last, waits=False)
    end_backward(model)


def await_gradients(model: nn.Module) -> None:
    """Wait for the pending reductions of a stage."""
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(True)
    end_gradient_reduction(model)


def require_reduced(model: nn.Module) -> None:
    """Raise UnsupportedError if gradients were not summed over replicas in this step.

    The last microbatch sums them, but not for parameters that it does not use.
    """
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    if holds_partial_sums(model):
        raise UnsupportedError(
            "the last microbatch of the step does not use all parameters of earlier ones, so their gradients are not "
            'summed over replicas: use all parameters in each microbatch, or set layout.gradient_sync to "step"'
        )


def prefetch_first_parameters(model: nn.Module, layout: Layout) -> None:
    """Start to all-gather a stage's parameters if they stay unsharded; a collective.

    A pipeline stage would otherwise all-gather after it has waited for its first microbatch.
    """
    if is_one_graph(model):
        return
    assert isinstance(model, FSDPModule)
    if layout.pp > 1 and layout.fsdp > 1 and not _reshard_after_forward(layout, layout.fsdp):
        start_unshard(model)


def reshard_model(model: nn.Module) -> None:
    """Free unsharded parameters, of which a forward without a backward keeps some."""
    for module in _units(model):
        module.reshard()


def _shard_experts(block: nn.Module, shard: Callable[..., Any], meshes: Meshes) -> None:
    """Shard the experts of `block` over the ranks that hold the same ones, if these differ from those of the block."""
    layout = meshes.layout
    if not have_own_ranks(layout):
        return
    # Partial resharding does not support parameters sharded by ep (2.13), so experts reshard completely.
    reshard = bool(_reshard_after_forward(layout, layout.expert_dp_shard))
    for experts in expert_modules(block):
        shard(
            experts,
            mesh=meshes.sharding("expert_dp_shard"),
            reshard_after_forward=reshard,
            shard_placement_fn=_placement_of_experts(experts, layout.expert_dp_shard),
        )
        hide_from_selective_checkpoint(experts)


def _placement_of_experts(module: nn.Module, degree: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP2's placement function for parameters of `module` over `degree` ranks; None means Shard(0).

    FSDP2 pads dim 0: 8 experts over 64 ranks would be all-gathered as 64.
    """
    experts = {id(parameter) for one in expert_modules(module) for parameter in one.parameters()}

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(expert_shard_dim(parameter, degree)) if id(parameter) in experts else None

    return place


def _units(module: nn.Module) -> list[FSDPModule]:
    """Return the units of FSDP2 in `module`, outermost first."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def _mixed_precision(precision: PrecisionSection, *, casts_inputs: bool) -> MixedPrecisionPolicy:
    compute, reduce = TORCH_DTYPES[precision.compute], TORCH_DTYPES[precision.reduce]
    if compute is torch.float64:
        reduce = compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=casts_inputs)


def _offload_policy(layout: Layout, device_type: str) -> OffloadPolicy:
    if not layout.cpu_offload:
        return OffloadPolicy()
    # pin_memory on a CPU is an error.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def _reshard_after_forward(layout: Layout, degree: int) -> bool | int:
    """Return FSDP2's reshard_after_forward for parameters sharded over `degree` ranks."""
    match layout.reshard_after_forward:
        case "never":
            return False
        case "always":
            return degree > 1
        case "auto":
            # In a pipeline resharding would repeat the all-gather for each microbatch.
            return degree > 1 and layout.pp == 1
        case group:
            group = math.gcd(group, degree)
            return group if group > 1 else False


def _prefetch(model: nn.Module, blocks: list[list[FSDPModule]], depth: int) -> None:
    """Have each block prefetch the next `depth` blocks, in backward the previous ones.

    `blocks` are lists of a block and the units within it.
    """
    assert isinstance(model, FSDPModule)
    model.set_modules_to_forward_prefetch(list(chain(*blocks[:depth])))
    model.set_modules_to_backward_prefetch(list(chain(*reversed(blocks[-depth:]))) if depth else [model])
    for index, (block, *inner) in enumerate(blocks):
        following = blocks[index + 1 : index + 1 + depth]
        preceding = blocks[max(index - depth, 0) : index][::-1]
        ahead, behind = (list(chain(inner if depth else (), *units)) for units in (following, preceding))
        block.set_modules_to_forward_prefetch(ahead)
        # An empty list means FSDP2's default; a unit that prefetches itself, already unsharded, prefetches nothing.
        block.set_modules_to_backward_prefetch(behind or [block])
        for unit in inner:
            unit.set_modules_to_backward_prefetch([unit])
