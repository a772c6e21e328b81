"""How long collectives wait: torch passes what init_process_group was given to the default group alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist


def wait_like_default_group(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let collectives of `groups` wait as long as those of the default group.

    A DeviceMesh gives its groups the limit of their backend, 30 minutes with gloo and 10 with NCCL, whatever
    init_process_group was given (torch 2.11 to 2.13).
    """
    of_default = _backends(dist.distributed_c10d._get_default_group())
    for group in groups:
        for device, backend in _backends(group).items():
            if device in of_default:
                backend._set_default_timeout(of_default[device].options._timeout)


def _backends(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return what communicates for each kind of device; nothing for fake groups."""
    names = [name for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(dist, name)]
    kinds = tuple(getattr(dist, name) for name in names)
    backends = {device.type: group._get_backend(torch.device(device.type)) for device in group._device_types}
    return {device: backend for device, backend in backends.items() if isinstance(backend, kinds)}
