"""place_of(): whether an operator runs on the device, on the host, or copies between their memories.

The host's own operators are recorded from 64 KiB on: what is smaller, such as an optimizer's count of steps, takes less
than its launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwright.parallelism.torch_private.torch_dispatch import argument_names
from meshwright.spec.trace.trace import OpPlace

_LEAST_HOST_BYTES = 1 << 16
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")


def place_of(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device_type: str) -> OpPlace | None:
    """Return where an operator runs; None of one that neither concerns the device nor takes the host time."""
    on_device = [tensor.device.type == device_type for tensor in (*inputs, *outputs)]
    if not any(on_device):
        num_bytes = sum(tensor.nbytes for tensor in inputs)
        return "host" if device_type != "cpu" and num_bytes >= _LEAST_HOST_BYTES else None
    if all(on_device) or func.overloadpacket.__name__ not in _COPIES:
        return "device"
    # Operators in place return what they write to.
    written = outputs[0] if outputs else inputs[0]
    return "to_device" if written.device.type == device_type else "to_host"


def is_blocking(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits until a copy to it has finished."""
    given = dict(zip(argument_names(func), args, strict=False)) | kwargs
    return not given.get("non_blocking", False)
