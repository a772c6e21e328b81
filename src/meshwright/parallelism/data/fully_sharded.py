"""FSDP2, HSDP and DDP: parameters, gradients and optimizer state shared by the ranks that see different tokens.

DDP is HSDP whose shards are whole: each rank keeps all parameters, and gradients are summed over dp_replicate only.
Every reduction sums. One division at the end of the step, by what all parallelisms together come to, is the mean; a
division here would divide twice what other axes have summed already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.errors import UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.parallelism.expert.experts import expert_modules, expert_shard_dim, have_own_ranks
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_fsdp import (
    begin_gathering,
    end_backward,
    end_gradient_reduction,
    hide_from_selective_checkpoint,
    holds_partial_sums,
    overlap_reductions,
)
from meshwright.spec.job.sections import DType, PrecisionSection
from meshwright.spec.layout.layout import Layout

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def shard_model(model: nn.Module, layout: Layout, precision: PrecisionSection, meshes: Meshes) -> None:
    """Shard one stage in place: experts, each block, then what is left.

    Also on one rank, since it does the mixed precision.
    """
    casts = getattr(model, "casts_block_inputs", True)
    block_policy, root_policy = (_mixed_precision(precision, casts_inputs=cast) for cast in (casts, True))
    shard = partial(fully_shard, offload_policy=_offload_policy(layout, meshes.device_type))
    blocks = [block for block in blocks_of(model) if block is not None]
    for block in blocks:
        _shard_experts(block, partial(shard, mp_policy=block_policy), meshes)
        reshard = _reshard_after_forward(layout, layout.fsdp)
        # torch keeps no groups of n for what is cut in another dim than the first (2.13).
        place = _placement_of_experts(block, layout.fsdp) if isinstance(reshard, bool) else None
        mesh = meshes.sharding("fsdp")
        shard(block, mesh=mesh, mp_policy=block_policy, reshard_after_forward=reshard, shard_placement_fn=place)
    # The root's own parameters (embedding, head) are needed again at once in backward.
    shard(model, mesh=meshes.sharding("fsdp"), mp_policy=root_policy, reshard_after_forward=False)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        # Without it a factor is a reduction of its own kind, which gloo does not have (PREMUL_SUM).
        module.set_force_sum_reduction_for_comms(True)
    assert isinstance(model, FSDPModule)
    units = [_units(block) for block in blocks]
    overlap_reductions(model, max(map(len, units), default=1))
    _prefetch(model, units, layout.prefetch)


def set_gradient_sync(model: nn.Module, layout: Layout, *, reduces: bool, is_last: bool, waits: bool) -> None:
    """Set what the next backward passes of a stage do with gradients.

    With `reduces` they reduce-scatter them, else they add up whole gradients on this rank. The last backward of a step
    also sums over replicas, which hold sums of shards until then, and frees parameters that are kept after forward.
    With `waits` a backward ends when its reductions have, else `await_gradients` does.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduces)
    model.set_requires_all_reduce(reduces and is_last)
    model.set_is_last_backward(waits)
    model.set_reshard_after_backward(is_last or bool(_reshard_after_forward(layout, layout.fsdp)))
    for experts in expert_modules(model) if have_own_ranks(layout) else ():
        assert isinstance(experts, FSDPModule)
        experts.set_reshard_after_backward(is_last or bool(_reshard_after_forward(layout, layout.expert_dp_shard)))


def accumulate_gradients(model: nn.Module) -> None:
    """Add the gradients of a stage's last backward to their sum over microbatches, in the format they are reduced in.

    FSDP2's hooks do it in a backward to the inputs. Those of a backward to the weights would wait there, in the format
    of the parameters, for the next backward to the inputs, and several of them would be added up in it.
    """
    assert isinstance(model, FSDPModule)
    end_backward(model)


def reduce_gradients(model: nn.Module, layout: Layout, *, is_last: bool) -> None:
    """Begin to reduce the gradients that a stage's backward passes have left on this rank; a collective.

    After the last reduction of a step parameters hold their shards again, gradients after `await_gradients`.
    """
    assert isinstance(model, FSDPModule)
    set_gradient_sync(model, layout, reduces=True, is_last=is_last, waits=False)
    end_backward(model)


def await_gradients(model: nn.Module) -> None:
    """Wait for the reductions of a stage that no backward has waited for."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(True)
    end_gradient_reduction(model)


def require_summed(model: nn.Module) -> None:
    """Raise UnsupportedError if replicas still hold their own sums at the end of a step.

    The last microbatch sums them, unless it does not use what earlier ones did: gradients would be lost unnoticed.
    """
    assert isinstance(model, FSDPModule)
    if holds_partial_sums(model):
        raise UnsupportedError(
            "the last microbatch of the step has no gradient of parameters that earlier ones used, and replicas are "
            "summed with its gradients: use all parameters in each microbatch, or set layout.gradient_sync to "
            '"step"'
        )


def gather_ahead(model: nn.Module, layout: Layout) -> None:
    """Begin to gather a stage's parameters, if they then stay; a collective.

    A pipeline's stages wait for their first microbatch, and would gather after it came.
    """
    assert isinstance(model, FSDPModule)
    if layout.pp > 1 and layout.fsdp > 1 and not _reshard_after_forward(layout, layout.fsdp):
        begin_gathering(model)


def reshard_model(model: nn.Module) -> None:
    """Free unsharded parameters, so that the model holds its shards again: a forward without a backward keeps some."""
    for module in _units(model):
        module.reshard()


def _shard_experts(block: nn.Module, shard: Callable[..., Any], meshes: Meshes) -> None:
    """Shard the experts of `block` over the ranks that hold the same ones, where these are not those of the block."""
    layout = meshes.layout
    if not have_own_ranks(layout):
        return
    # torch keeps no groups of n for what ep has cut (2.13), so these free all that the block's would keep a part of.
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
    """Return what tells FSDP2 in which dim to cut a parameter of `module` into `degree` parts; None means the first.

    Cut by experts, 8 of them over 64 ranks would be gathered as 64: FSDP2 pads.
    """
    experts = {id(parameter) for one in expert_modules(module) for parameter in one.parameters()}

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(expert_shard_dim(parameter, degree)) if id(parameter) in experts else None

    return place


def _units(module: nn.Module) -> list[FSDPModule]:
    """Return what FSDP2 gathers and reduces as one, outermost first."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def _mixed_precision(precision: PrecisionSection, *, casts_inputs: bool) -> MixedPrecisionPolicy:
    compute, reduce = TORCH_DTYPES[precision.compute], TORCH_DTYPES[precision.reduce]
    if compute is torch.float64:
        reduce = compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=casts_inputs)


def _offload_policy(layout: Layout, device_type: str) -> OffloadPolicy:
    if not layout.cpu_offload:
        return OffloadPolicy()
    # Only an accelerator pins memory; on a CPU asking for it is an error.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def _reshard_after_forward(layout: Layout, degree: int) -> bool | int:
    """Return whether to free what was gathered over `degree` ranks, or on how many of them to keep a copy."""
    match layout.reshard_after_forward:
        case "never":
            return False
        case "always":
            return degree > 1
        case "auto":
            # A pipeline has several microbatches under way: freed after each, parameters would travel for each.
            return degree > 1 and layout.pp == 1
        case group:
            group = math.gcd(group, degree)
            return group if group > 1 else False


def _prefetch(model: nn.Module, blocks: list[list[FSDPModule]], depth: int) -> None:
    """Have each block gather, when it is reached, the `depth` blocks after it (in backward: before it).

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
        # With none given, FSDP2 guesses one; a unit that prefetches itself, which is there already, gets none.
        block.set_modules_to_backward_prefetch(behind or [block])
        for unit in inner:
            unit.set_modules_to_backward_prefetch([unit])
