"""Dispatched torch operators: their tensors, signatures and kernel counts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from meshwright.memory.managed_tensors import is_managed
from meshwright.spec.trace.trace import Signature, TensorShape

_MATMULS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm")


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, however nested, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def is_float8(tensor: Tensor) -> bool:
    """Return whether a tensor is in one of torch's formats of 8-bit floating point."""
    return tensor.dtype.itemsize == 1 and tensor.is_floating_point()


@cache
def wraps_tensors(kind: type) -> bool:
    """Return whether tensors of this class wrap tensors, and dispatch operators again on these."""
    return issubclass(kind, AsyncCollectiveTensor) or is_traceable_wrapper_subclass_type(kind)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that `tensor` wraps, however deep, or itself."""
    # mypy holds that no tensor can be such a subclass.
    whole: Any = tensor
    if not is_traceable_wrapper_subclass(whole):
        yield tensor
        return
    names, _ = whole.__tensor_flatten__()
    # A DTensor also lists its mesh.
    for part in (getattr(whole, name) for name in names):
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def storage_identity(tensor: Tensor) -> int:
    """Return a number that plain tensors of one storage share; valid while one of them is alive (private, 2.13)."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[Tensor], device_type: str | None = None) -> int:
    """Return the bytes of the storages of `tensors` on this rank, each counted once, those of one device if given:
    without managed memory, which is the host's.
    """
    parts = [part for tensor in tensors for part in plain_tensors(tensor)]
    own = [part for part in parts if device_type is None or (device_type == part.device.type and not is_managed(part))]
    return sum({storage_identity(part): part.untyped_storage().nbytes() for part in own}.values())


@cache
def only_views(func: Any) -> bool:
    """Return whether all results of an operator are views, so that it launches no kernel."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


@cache
def argument_names(func: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(argument.name for argument in func._schema.arguments)


def is_causal_attention(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator is attention with a causal mask."""
    if "attention" not in func._opname:
        return False
    return bool((dict(zip(argument_names(func), args, strict=False)) | kwargs).get("is_causal", False))


def takes_tf32(func: Any, outputs: Sequence[Tensor]) -> bool:
    """Return whether an operator is a float32 matmul for which TF32 is enabled."""
    if func._opname not in _MATMULS or not outputs or outputs[0].dtype != torch.float32:
        return False
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def signature_of(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_causal: bool) -> Signature:
    """Return the signature of an operator on these tensors, without FLOPs."""
    return Signature(
        op=str(func),
        inputs=tuple(shape_of(tensor) for tensor in inputs),
        outputs=tuple(shape_of(tensor) for tensor in outputs),
        is_causal=is_causal,
        read_bytes=sum(tensor.nbytes for tensor in inputs),
        written_bytes=sum(tensor.nbytes for tensor in outputs),
    )


def shape_of(tensor: Tensor) -> TensorShape:
    """Return a tensor's type and sizes."""
    return TensorShape(dtype=str(tensor.dtype).removeprefix("torch."), dims=tuple(tensor.shape))


def count_kernels(call: Callable[[], object]) -> int:
    """Return the number of operators that `call` runs, without views."""
    counter = _Counter()  # type: ignore[no-untyped-call]
    with counter:
        call()
    return int(counter.count)


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
