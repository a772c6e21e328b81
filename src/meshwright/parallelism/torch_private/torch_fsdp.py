"""FSDP2 operations that are public only as part of a backward, through private parts.

torch's own pipelines do the same (torch/distributed/pipelining/stage.py). Checked in 2.13.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from meshwright.errors import UnsupportedError
from meshwright.parallelism.torch_private.torch_dispatch import storage_bytes
from meshwright.parallelism.torch_private.torch_nccl import new_group_like
from meshwright.spec.job.memory_section import CommunicationPool
from meshwright.spec.trace.timeline import OWN_REDUCE_GROUP


def end_backward(root: FSDPModule) -> None:
    """Run the post-backward of every unit under `root`: accumulate, or reduce and reshard if sync is on.

    `end_gradient_reduction` waits for the reductions.
    """
    for group in _param_groups(root._get_fsdp_state()):
        group.post_backward()


@contextmanager
def backward_in_parts(root: FSDPModule) -> Iterator[None]:
    """Run several autograd backwards as parts of one; `end_backward` then reduces their gradients.

    One that starts at the output of a unit, as that to the last weight inside of it does, would otherwise end with the
    post-backward of every unit: it reduces the gradients so far, and later ones apart. HSDP adds up such partial sums
    as if they were of the same parameters.
    """
    state: Any = root._get_fsdp_state()
    context = state._state_ctx
    # FSDP2 queues its post-backward once in a backward.
    context.post_backward_final_callback_queued = True
    try:
        yield
    finally:
        context.post_backward_final_callback_queued = False
        for unit in (*context.all_states, *_param_groups(state)):
            unit._training_state = TrainingState.IDLE


def end_gradient_reduction(root: FSDPModule) -> None:
    """Wait for the pending reductions under `root`."""
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def holds_partial_sums(root: FSDPModule) -> bool:
    """Return whether a unit under `root` holds sharded gradients that were not summed over replicas.

    From torch 2.15 on, units that the last backward does not use are summed too.
    """
    return any(group._partial_reduce_output is not None for group in _param_groups(root._get_fsdp_state()))


def start_unshard(root: FSDPModule) -> None:
    """Start to all-gather the parameters of every unit under `root`; a collective. Each unit waits in forward."""
    state: Any = root._get_fsdp_state()
    state._lazy_init()
    for unit in reversed(list(_param_groups(state))):
        unit.unshard(async_op=True)


def fsdp_placement(dim: int, of_others: Sequence[tuple[Placement, int]]) -> Placement:
    """Return the placement that FSDP2 gives `dim` over its ranks; `of_others` are those over other axes, with degrees.

    Where they shard the same dim, each of theirs is cut again: shards interleave, which has a private type (2.13).
    """
    factor = math.prod(size for placement, size in of_others if placement.is_shard(dim))
    return _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def sum_shards_with(root: FSDPModule, sum_: Callable[[Tensor], object]) -> None:
    """Call `sum_` with the sharded gradients of each unit, flat, once they are reduced over this process group.

    In the format of reductions, before they are cast, in the last backward of a step; it changes them in place.
    """
    for group in _all_groups(root):
        group._all_reduce_hook = sum_


def complete_reductions(root: FSDPModule, note: Callable[[nn.Parameter], object]) -> None:
    """Give zeros to what a unit reduces and backward made no gradient of on this rank; `note` is called with each.

    torch 2.13 can itself (set_reduce_scatter_unused_params), but mixes formats where earlier microbatches left sums.
    """
    for group in _all_groups(root):
        group.post_backward = partial(_complete_first, group, group.post_backward, note)


def _complete_first(
    group: Any, post_backward: Callable[..., None], note: Callable[[nn.Parameter], object], *args: Any
) -> None:
    if group.reduce_grads:
        _complete(group, note)
    post_backward(*args)


@torch.no_grad()
def _complete(group: Any, note: Callable[[nn.Parameter], object]) -> None:
    """Give all parameters of a unit that has a gradient one, in one format."""
    trained = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param") and one.sharded_param.requires_grad]
    # Sums over earlier microbatches, in the format of reductions, or gradients of this one, in that of parameters.
    summed = [one for one in trained if one.unsharded_accumulated_grad is not None]
    new = [one for one in trained if one not in summed and one._unsharded_param.grad is not None]
    if not summed and not new:
        return
    for one in trained:
        if one not in summed and one not in new:
            note(one.sharded_param)
            one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
        if summed and one not in summed:
            one.to_accumulated_grad_if_needed()


def change_gradients(root: FSDPModule, change: Callable[[list[Tensor]], object]) -> None:
    """Call `change` with a unit's gradients of one backward on this rank, before FSDP2 adds them to any other."""
    for group in _all_groups(root):
        group.post_backward = partial(_change_first, group, group.post_backward, change)


def _change_first(
    group: Any, post_backward: Callable[..., None], change: Callable[[list[Tensor]], object], *args: Any
) -> None:
    _change(group, change)
    # It frees gradients, of which nothing here may hold a reference.
    post_backward(*args)


@torch.no_grad()
def _change(group: Any, change: Callable[[list[Tensor]], object]) -> None:
    unsharded = [getattr(one, "_unsharded_param", None) for one in group.fsdp_params]
    gradients = [one.grad for one in unsharded if one is not None and one.grad is not None]
    if gradients:
        change([one.to_local() if isinstance(one, DTensor) else one for one in gradients])


def overlap_reductions(root: FSDPModule, num_units: int) -> None:
    """Allow `num_units` pending reductions under `root`; the default, and the only choice before torch 2.13, is one.

    A block whose experts are a unit of their own has two reductions. With one pending, that of the experts, most of
    the bytes, would overlap with the rest of its block only.
    """
    if hasattr(root, "set_reduce_scatter_max_input_buffers"):
        root.set_reduce_scatter_max_input_buffers(num_units)


def separate_reductions(units: Sequence[FSDPModule]) -> None:
    """Reduce-scatter the gradients of `units` in process groups of their own, one for each set of ranks; a collective.

    NCCL runs the collectives of a communicator one by one. torch 2.13 has set_separate_reduce_scatter_group, whose
    groups have no axis in their names; a custom reduce-scatter exists since 2.9.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for unit in units:
        of_unit: Any = unit
        for group in _groups_of(of_unit._get_fsdp_state()):
            shards = group.mesh_info.shard_process_group
            ranks = tuple(dist.get_process_group_ranks(shards))
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                axis = group.mesh_info.mesh.mesh_dim_names[-1]
                groups[ranks] = new_group_like(shards, list(ranks), f"mesh_{axis}{OWN_REDUCE_GROUP}")
            of_unit.set_custom_reduce_scatter(_ReduceScatterIn(groups[ranks]))


class _ReduceScatterIn(DefaultReduceScatter):
    """FSDP2's reduce-scatter, in a group other than that of its all-gathers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Start the reduction; `group` is that of the all-gathers."""
        return super().__call__(output_tensor, input_tensor, self._group, op, async_op)


def hide_from_selective_checkpoint(unit: nn.Module) -> None:
    """Hide FSDP2's hooks of `unit`, which is inside of a block, from the block's selective checkpoint.

    The checkpoint rejects an op in recomputation that forward did not run, and whether a unit all-gathers in its call
    or was prefetched may differ between the two.
    """
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = partial(_outside_of_checkpoint, hook)


def unsharded_bytes(root: FSDPModule) -> int:
    """Return the bytes of all-gathered parameters and of unreduced gradients under `root` that have memory now."""
    tensors = []
    for group in _param_groups(root._get_fsdp_state()):
        for one in group.fsdp_params:
            unsharded = getattr(one, "_unsharded_param", None)
            gradients = [one.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
            tensors += [*one.all_gather_outputs, *gradients]
    return storage_bytes(tensor for tensor in tensors if tensor is not None)


def move_shard(root: FSDPModule, parameter: nn.Parameter, empty_like: Callable[[Tensor, torch.Size], Tensor]) -> None:
    """Move this rank's shard of a parameter under `root` into memory that `empty_like` returns, padding included.

    FSDP2 pads a shard that is smaller than the first rank's, in memory of its own choice unless it finds it padded.
    """
    all_params = (one for group in _all_groups(root) for one in group.fsdp_params)
    found: Any = next(one for one in all_params if one.sharded_param is parameter)
    local, dim = found.sharded_param._local_tensor, found.fsdp_placement.dim
    padded = empty_like(local, found.padded_sharded_param_size).zero_()
    moved = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
    moved.copy_(local)
    found._sharded_param_data, found.sharded_param._local_tensor = padded.view(-1), moved


def use_communication_pool(unit: FSDPModule, pool: CommunicationPool) -> None:
    """Let a unit's all-gathers and reduce-scatters take their buffers from `pool`: a group's allocator ("nccl"), which
    registers them, or symmetric memory; raises UnsupportedError where this torch has no such pool.
    """
    if pool == "nccl":
        unit.set_allocate_memory_from_process_group_for_comm(True)
    elif not hasattr(unit, "set_symm_mem_for_comm"):
        raise UnsupportedError(
            f'memory.communication = "symmetric": FSDP2 of torch {torch.__version__} has no set_symm_mem_for_comm '
            '(torch 2.13 has): install a newer torch, or set memory.communication to "nccl"'
        )
    else:
        unit.set_symm_mem_for_comm()


def modules_of_unit(owner: object) -> Sequence[nn.Module]:
    """Return the modules whose parameters `owner`, an FSDPParamGroup, all-gathers; empty for any other object."""
    return owner.modules if isinstance(owner, FSDPParamGroup) else ()


def _outside_of_checkpoint(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        with _pop_mode_temporarily():
            return hook(*args, **kwargs)
    return hook(*args, **kwargs)


def _param_groups(root_state: Any) -> list[Any]:
    """Return the parameter groups, each of one all-gather, in backward order."""
    groups: list[Any] = []
    for state in reversed(root_state._state_ctx.all_states):
        groups.extend(_groups_of(state))
    return groups


def _all_groups(root: FSDPModule) -> list[Any]:
    """Return the parameter groups of every unit under `root`, also before its first forward."""
    assert isinstance(root, nn.Module)
    units = (unit._get_fsdp_state() for unit in root.modules() if isinstance(unit, FSDPModule))
    return [group for state in units for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one unit: one or none up to torch 2.12, a list after."""
    of_state = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if of_state is None else of_state
    return [group for group in groups if group is not None]
