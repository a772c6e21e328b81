"""What FSDP2 does by itself only inside of a backward pass, done when we say: through its private parts.

torch's own pipelines do the same (torch/distributed/pipelining/stage.py). Checked in 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule


def run_gradient_reduction(root: FSDPModule) -> None:
    """Run what follows the last backward in every unit under `root`: reduce, reshard, wait; a collective."""
    state: Any = root._get_fsdp_state()
    for group in _param_groups(state):
        group.post_backward()
    state._root_post_backward_final_callback()


def _param_groups(root_state: Any) -> list[Any]:
    """Return the groups of parameters that travel together, in the order in which a backward reaches them."""
    groups: list[Any] = []
    for state in reversed(root_state._state_ctx.all_states):
        # One group or none up to torch 2.12, a list after.
        of_state = getattr(state, "_fsdp_param_groups", None)
        groups.extend([state._fsdp_param_group] if of_state is None else of_state)
    return [group for group in groups if group is not None]
