"""The process group of a traced rank, which exists before the program initializes it: environment, backends."""

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d

from meshwright.spec.trace.trace import GroupCall
from meshwright.tracer.programs.program_lines import line_of_program
from meshwright.tracer.torch_patches.torch_names import replace

_MAX_DEVICES_PER_NODE = 8
_DEVICE_ONLY = ("nccl", "cuda:nccl")
"""Backends, as programs name them, without one for CPU tensors."""


def set_torchrun_environment(rank: int, world_size: int) -> int:
    """Set the variables that torchrun sets for a rank, and return the number of ranks of its node."""
    local = world_size if world_size <= _MAX_DEVICES_PER_NODE else math.gcd(world_size, _MAX_DEVICES_PER_NODE)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    return local


_group_calls: list[GroupCall] = []
_backends: dict[str, str] = {}
"""The backend that the program asked for, by a group's name; "" is that of the group of all ranks."""


def group_calls() -> tuple[GroupCall, ...]:
    """Return the traced rank's calls of new_group() that all ranks have to make."""
    return tuple(_group_calls)


def serves_host(group: ProcessGroup) -> bool:
    """Return whether a group communicates CPU tensors: not with NCCL alone; the default is NCCL and gloo."""
    return _backends.get(group.group_name, _backends.get("")) not in _DEVICE_ONLY


def own_groups() -> tuple[tuple[int, ...], ...]:
    """Return the global ranks of each of this rank's groups, except the default group."""
    found = (tuple(dist.get_process_group_ranks(group)) for group in distributed_c10d._world.pg_map)
    return tuple(dict.fromkeys(ranks for ranks in found if len(ranks) < dist.get_world_size()))


def take_over_process_group() -> None:
    """Make init_process_group() return the existing fake group, and new groups of any backend fake."""
    _group_calls.clear()
    _backends.clear()
    replace((dist, distributed_c10d), "init_process_group", _with_backend_kept)
    replace((dist, distributed_c10d), "destroy_process_group", lambda _: _nothing)
    replace((dist, distributed_c10d), "new_group", _with_fake_backend)


def _with_fake_backend(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("use_local_synchronization"):
            _group_calls.append(GroupCall(tuple(given.get("ranks") or ()), line_of_program()))
        group = make(**{name: value for name, value in given.items() if name != "backend"})
        if given.get("backend") is not None and isinstance(group, ProcessGroup):
            _backends[group.group_name] = str(given["backend"]).lower()
        return group

    return made


def _with_backend_kept(make: Callable[..., Any]) -> Callable[..., None]:
    """Return a replacement of init_process_group() that only keeps the backend, since the group exists."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> None:
        backend = signature.bind(*args, **kwargs).arguments.get("backend")
        if backend is not None:
            _backends[""] = str(backend).lower()

    return made


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a function that must have no effect in a trace."""
