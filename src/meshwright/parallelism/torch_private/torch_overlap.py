"""How torch's compiler orders the collectives of a block among its kernels; private (checked in 2.11 to 2.15).

By default it waits for each collective right behind its start. In the backward of column-parallel layers the gradients
of weights need nothing that is under way, so that each can hide a collective.
"""

from typing import Any

import torch

_COLLECTIVE, _JOINT = "torch.ops._c10d_functional.", "torch.ops.symm_mem."
_WAIT = f"{_COLLECTIVE}wait_tensor"


def overlap_collectives() -> None:
    """Let inductor, from here on, start collectives as soon as it can and put a kernel behind the start of each.

    The kernel comes from what the next collective needs, else from what does not wait: a matmul or attention.
    """
    config: Any = torch._inductor.config
    config.reorder_for_compute_comm_overlap = True
    config.reorder_for_compute_comm_overlap_passes = ["reorder_compute_for_overlap", _start_behind_joint_kernels]
    # The default asks the device for its speed, and ranks whose answers differ would deadlock.
    config.estimate_op_runtime = _cost


def _start_behind_joint_kernels(steps: list[Any]) -> list[Any]:
    """Return the steps with each collective behind the joint kernel (async tp) that would run next to it.

    Such a kernel hides its own communication over the same links. What follows it can hide the other collective.
    """
    ordered = list(steps)
    for step in steps:
        if not _kernel(step).startswith(_COLLECTIVE) or _kernel(step).startswith(_WAIT):
            continue
        place = ordered.index(step)
        for later in range(place + 1, len(ordered)):
            # Only its wait depends on it, and ranks keep to one order of collectives.
            if _kernel(ordered[later]).startswith(_COLLECTIVE):
                break
            if _kernel(ordered[later]).startswith(_JOINT):
                ordered.insert(later, ordered.pop(place))
                break
    return ordered


def _cost(step: Any) -> float:
    """Return 1 for a collective and for a library's kernel, which hides one; 0 for what the compiler writes itself."""
    return float(bool(_kernel(step)))


def _kernel(step: Any) -> str:
    """Return the library's kernel that a step calls; "" of others, also of those that only name one of its results."""
    return getattr(step.node, "python_kernel_name", None) or ""
