"""OpCall: the tensors of one operator call, its FLOPs as torch.utils.flop_counter counts them, and where it runs.

An operator runs on the device, on the host, or copies between their memories. Operators of the host are recorded from
64 KiB on: smaller ones, such as an optimizer's step count, take less than their launch. FLOPs are equal in torch 2.11
to 2.15, except for fused attention on a CPU, which only 2.15 counts.
"""

from functools import cache, cached_property
from typing import Any

from torch.utils.flop_counter import flop_registry

from meshwright.memory.managed_tensors import managed_bytes
from meshwright.parallelism.torch_private.torch_dispatch import (
    argument_names,
    is_causal_attention,
    signature_of,
    takes_tf32,
    tensors_in,
)
from meshwright.spec.trace.trace import OpPlace, Signature

_LEAST_HOST_BYTES = 1 << 16
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")


class OpCall:
    """One call of an operator, and its result."""

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.inputs, self.outputs = tensors_in((args, kwargs)), tensors_in(result)

    @cached_property
    def given(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {**dict(zip(argument_names(self.func), self.args, strict=False)), **self.kwargs}

    def written_inputs(self) -> set[int]:
        """Return the ids of the tensors among its arguments that it writes to."""
        names = _written_names(self.func)
        return {id(tensor) for tensor in tensors_in([self.given.get(name) for name in names])} if names else set()

    def place(self, device_type: str) -> OpPlace | None:
        """Return where it runs; None for one that takes neither the device nor the host time."""
        on_device = [tensor.device.type == device_type for tensor in (*self.inputs, *self.outputs)]
        if not any(on_device):
            num_bytes = sum(tensor.nbytes for tensor in self.inputs)
            return "host" if device_type != "cpu" and num_bytes >= _LEAST_HOST_BYTES else None
        if all(on_device) or self.func.overloadpacket.__name__ not in _COPIES:
            return "device"
        # In-place operators return their output.
        written = self.outputs[0] if self.outputs else self.inputs[0]
        return "to_device" if written.device.type == device_type else "to_host"

    @property
    def is_blocking(self) -> bool:
        """Return whether the host waits until a copy to it has finished."""
        return not self.given.get("non_blocking", False)

    def key(self, device_type: str) -> tuple[Any, ...]:
        """Return a key that determines its signature."""
        is_tf32 = device_type != "cpu" and takes_tf32(self.func, self.outputs)
        is_causal = is_causal_attention(self.func, self.args, self.kwargs)
        shapes = ((tensor.dtype, tensor.shape) for tensor in (*self.inputs, *self.outputs))
        return (self.func, is_causal, is_tf32, len(self.inputs), *self._managed, *shapes)

    @cached_property
    def _managed(self) -> tuple[int, int]:
        """Return the bytes that it reads and writes in managed memory."""
        read = managed_bytes(self.inputs)
        if not read and not managed_bytes(self.outputs):
            return 0, 0
        names = self.written_inputs()
        written = {id(one): one for one in (*self.outputs, *(one for one in self.inputs if id(one) in names))}
        return read, managed_bytes([*written.values()])

    def signature(self, device_type: str) -> Signature:
        """Return its signature, without its place and what ranks of a collective agree on."""
        func, is_causal = self.func, is_causal_attention(self.func, self.args, self.kwargs)
        return signature_of(func, self.inputs, self.outputs, is_causal=is_causal).replace(
            flops=flops_of(func, self.args, self.kwargs, self.result),
            is_tf32=device_type != "cpu" and takes_tf32(func, self.outputs),
            managed_read_bytes=self._managed[0],
            managed_written_bytes=self._managed[1],
        )


@cache
def _written_names(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to."""
    infos = ((argument.name, argument.alias_info) for argument in func._schema.arguments)
    return tuple(name for name, info in infos if info is not None and info.is_write)


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
