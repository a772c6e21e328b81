"""Properties of an operator call: FLOPs as torch.utils.flop_counter counts them, and where it runs.

An operator runs on the device, on the host, or copies between their memories. Operators of the host are recorded from
64 KiB on: smaller ones, such as an optimizer's step count, take less than their launch. FLOPs are equal in torch 2.11
to 2.15, except for fused attention on a CPU, which only 2.15 counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshwright.parallelism.torch_private.torch_dispatch import argument_names
from meshwright.spec.trace.trace import OpPlace

_LEAST_HOST_BYTES = 1 << 16
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")


def op_place(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device_type: str) -> OpPlace | None:
    """Return where an operator runs; None for one that takes neither the device nor the host time."""
    on_device = [tensor.device.type == device_type for tensor in (*inputs, *outputs)]
    if not any(on_device):
        num_bytes = sum(tensor.nbytes for tensor in inputs)
        return "host" if device_type != "cpu" and num_bytes >= _LEAST_HOST_BYTES else None
    if all(on_device) or func.overloadpacket.__name__ not in _COPIES:
        return "device"
    # In-place operators return their output.
    written = outputs[0] if outputs else inputs[0]
    return "to_device" if written.device.type == device_type else "to_host"


def is_blocking(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits until a copy to it has finished."""
    given = dict(zip(argument_names(func), args, strict=False)) | kwargs
    return not given.get("non_blocking", False)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call of an operator; 0 if torch has no count for it."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    if func._opname.startswith("_scaled_dot_product"):
        args = _with_equal_heads(func, args)
    return int(count(*args, **kwargs, out_val=result))


def _with_equal_heads(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Expand grouped heads of keys and values, which the counter of torch 2.11 does not support."""
    given = dict(zip(argument_names(func), args, strict=False))
    heads = given["query"].shape[-3]
    given |= {name: (*given[name].shape[:-3], heads, *given[name].shape[-2:]) for name in ("key", "value")}
    return list(given.values())
