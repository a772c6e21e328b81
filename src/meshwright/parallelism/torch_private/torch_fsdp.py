"""What FSDP2 does by itself only inside of a backward pass, done when we say: through its private parts.

torch's own pipelines do the same (torch/distributed/pipelining/stage.py). Checked in 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


def end_backward(root: FSDPModule) -> None:
    """Run what follows a backward in every unit under `root`: accumulate, or reduce and reshard where sync is on.

    A reduction is a collective, which `end_gradient_reduction` waits for.
    """
    for group in _param_groups(root._get_fsdp_state()):
        group.post_backward()


def end_gradient_reduction(root: FSDPModule) -> None:
    """Wait for the reductions that began under `root`."""
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def holds_partial_sums(root: FSDPModule) -> bool:
    """Return whether a unit under `root` holds shards of gradients that were not summed over replicas.

    From torch 2.15 on a unit that the last backward does not use is summed with the others.
    """
    return any(group._partial_reduce_output is not None for group in _param_groups(root._get_fsdp_state()))


def begin_gathering(root: FSDPModule) -> None:
    """Begin to gather the parameters of every unit under `root`; a collective. Each unit waits when it is called."""
    state: Any = root._get_fsdp_state()
    state._lazy_init()
    for unit in reversed(list(_param_groups(state))):
        unit.unshard(async_op=True)


def overlap_reductions(root: FSDPModule, num_units: int) -> None:
    """Let compute run ahead of the reductions of `num_units` units under `root`; by default it waits for each before
    the next unit's, as it also does before torch 2.13, which cannot be asked for more.

    A block whose experts are a unit of their own has two reductions, and that of the experts, most of its bytes, would
    hide behind the rest of its block alone.
    """
    if hasattr(root, "set_reduce_scatter_max_input_buffers"):
        root.set_reduce_scatter_max_input_buffers(num_units)


def hide_from_selective_checkpoint(unit: nn.Module) -> None:
    """Keep what FSDP2 does around the forward of `unit`, which lies within a block, out of the block's record.

    Selective checkpointing counts each op, and refuses one in recomputation that was not there before. Whether a unit
    gathers when it is called or has been gathered ahead may differ between the two.
    """
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = partial(_outside_of_checkpoint, hook)


def modules_of_unit(owner: object) -> Sequence[nn.Module]:
    """Return the modules whose parameters `owner`, an object of FSDP2's own, gathers; empty for any other object."""
    return owner.modules if isinstance(owner, FSDPParamGroup) else ()


def _outside_of_checkpoint(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        with _pop_mode_temporarily():
            return hook(*args, **kwargs)
    return hook(*args, **kwargs)


def _param_groups(root_state: Any) -> list[Any]:
    """Return the groups of parameters that travel together, in the order in which a backward reaches them."""
    groups: list[Any] = []
    for state in reversed(root_state._state_ctx.all_states):
        # One group or none up to torch 2.12, a list after.
        of_state = getattr(state, "_fsdp_param_groups", None)
        groups.extend([state._fsdp_param_group] if of_state is None else of_state)
    return [group for group in groups if group is not None]
