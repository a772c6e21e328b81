"""NCCL's options of a process group: how many CTAs, of one SM each, its kernels take (layout.communication_sms).

torch's builds without CUDA have no ProcessGroupNCCL, and groups of other backends no such options: both have no limit.
Each group needs options of its own, since torch writes its name and ranks into them. Checked in 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import device_mesh

from meshwright.channels.listening_sockets import closed_afterwards


def limited_options(max_ctas: int | None) -> Any:
    """Return new options of one group whose kernels take at most `max_ctas` CTAs, else as the default group has them.

    None without a limit, and where the default group does not communicate through NCCL.
    """
    backend = None if max_ctas is None else _nccl_backend(dist.distributed_c10d._get_default_group())
    if backend is None:
        return None
    nccl: Any = dist
    options = nccl.ProcessGroupNCCL.Options(is_high_priority_stream=backend.options.is_high_priority_stream)
    options.config.max_ctas = max_ctas
    # A mesh's groups wait as long as their options say, which would otherwise be torch's default.
    options._timeout = backend.options._timeout
    return options


def new_group_like(group: dist.ProcessGroup, ranks: list[int], name: str | None = None) -> dist.ProcessGroup:
    """Return a new group of `ranks`, this one among them, with the limit that `group` has; a collective of `ranks`."""
    # NCCL may listen for longer than the group takes to form.
    with closed_afterwards() if _nccl_backend(group) is None else nullcontext():
        made = dist.new_group(ranks, group_desc=name, use_local_synchronization=True, **_limits_of(group))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _limits_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return arguments of new_group() for the limit that `group` has; none if it has none."""
    options = limited_options(max_ctas_of(group))
    # Another timeout than that of the options is a warning (2.13).
    return {} if options is None else {"pg_options": options, "timeout": options._timeout}


def max_ctas_of(group: dist.ProcessGroup) -> int | None:
    """Return the most CTAs that kernels of `group` take; None without a limit and without NCCL."""
    backend = _nccl_backend(group)
    # NCCL marks what is not set by the least integer.
    return backend.options.config.max_ctas if backend is not None and backend.options.config.max_ctas > 0 else None


@contextmanager
def meshes_limited_like(group: dist.ProcessGroup) -> Iterator[None]:
    """Give the groups of meshes made inside the limit of `group`.

    FSDP2 makes those of reshard_after_forward = n itself and takes no options for them.
    """
    make = device_mesh.new_group

    def limited(*args: Any, **given: Any) -> Any:
        return make(*args, **given | _limits_of(group))

    device_mesh.new_group = limited
    try:
        yield
    finally:
        device_mesh.new_group = make


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return what communicates CUDA tensors of `group`, if that is NCCL."""
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        # It communicates tensors of other devices alone.
        return None
    nccl: Any = dist
    return backend if isinstance(backend, nccl.ProcessGroupNCCL) else None
