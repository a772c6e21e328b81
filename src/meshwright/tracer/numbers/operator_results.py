"""Results of operators on known numbers, and integers that programs compute on the host, for real, not traced.

Integers that programs compute on the host, such as the order of a data set: computed for real, not traced.
Data loaders use them as indices and sizes. Floating-point tensors stay fake on the host too: whole models are built
there.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallelism.torch_private.torch_dispatch import tensors_in
from meshwright.tracer.numbers.number_exchange import Number
from meshwright.tracer.record.op_call import OpCall

Kind = Literal["constant", "same", "pointwise", "reduction", "kept", "other"]

_CONSTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), lambda _: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda _: 1),
    **dict.fromkeys(("full", "full_like", "new_full"), lambda given: given["fill_value"]),
    "scalar_tensor": lambda given: given["s"],
    "fill_": lambda given: given["value"],
}
_SAME = ("copy_", "_to_copy", "clone", "cat", "stack", "any", "all", "max", "min", "amax", "amin", "mean")
"""Operators that map equal numbers to the same number."""
_POINTWISE = ("__ior__", "__iand__", "__ixor__")
"""Pointwise operators that torch does not tag."""
_KEPT = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
"""A gradient scaler keeps its flag and scale if all gradients are finite."""


class Reading(NamedTuple):
    """A number that is read."""

    value: Number
    is_guess: bool


@cache
def kind_of(func: Any) -> Kind:
    """Return how an operator maps equal numbers."""
    name = func._schema.name.removeprefix("aten::")
    if name in _KEPT:
        return "kept"
    if name in _CONSTANTS:
        return "constant"
    if name in _SAME:
        return "same"
    if name == "sum":
        return "reduction"
    is_pointwise = torch.Tag.pointwise in func.tags or name in _POINTWISE
    return "pointwise" if is_pointwise and torch.Tag.nondeterministic_seeded not in func.tags else "other"


def constant_of(call: OpCall, result: Tensor) -> Reading | None:
    """Return the number that a factory writes; None if it is no number."""
    value = _CONSTANTS[call.func._schema.name.removeprefix("aten::")](call.given)
    if not isinstance(value, float | int):
        return None
    return in_dtype(Reading(value, is_guess=False), result.dtype)


def in_dtype(reading: Reading, dtype: torch.dtype) -> Reading | None:
    """Return a reading in a dtype; None for a guessed integer."""
    if dtype == torch.bool:
        return reading._replace(value=bool(reading.value))
    if dtype.is_floating_point:
        return reading._replace(value=float(reading.value))
    if dtype.is_complex or reading.is_guess or not torch.iinfo(dtype).min <= reading.value <= torch.iinfo(dtype).max:
        return None
    return reading._replace(value=int(reading.value))


def multiplied(reading: Reading, times: int) -> Reading:
    """Return a reading times the number of elements or ranks that are added up."""
    return reading if times == 1 else reading._replace(value=reading.value * times)


def run_on(call: OpCall, values: dict[int, Any]) -> list[Any] | None:
    """Return an operator's result in row-major order; `values` are by id of the input tensors.

    A number is the value of all elements, a tuple has all of them; None if the operator cannot run with them.
    """
    kwargs = {name: value for name, value in call.kwargs.items() if name != "device"}
    with unset_fake_temporarily(), torch.no_grad():
        args, kwargs = tree_map_only(Tensor, lambda one: _real(values[id(one)], one), (call.args, kwargs))
        try:
            (result,) = tensors_in(call.func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError):
            return None
        return None if result.is_complex() else result.ravel().tolist()


def _real(values: Any, like: Tensor) -> Tensor:
    if not isinstance(values, tuple):
        return torch.full((), values, dtype=like.dtype, device="cpu")
    return torch.tensor(values, dtype=like.dtype).reshape(like.shape)


_MOST_ELEMENTS = 1 << 26
_DRAWN = ("randint", "randperm", "tril_indices", "triu_indices")
"""Factories of integers by default."""
_OF_ARGUMENTS = ("arange", "full", "scalar_tensor")
"""Factories whose results are integers if their arguments are."""


def is_of_the_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator takes only integers or booleans on the host, or makes them without inputs."""
    if func.namespace != "aten" or (args and isinstance(args[0], FakeTensor)):
        return False
    if (device := kwargs.get("device")) is not None and device.type != "cpu":
        return False
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors:
        return all(map(is_whole_on_host, tensors))
    return _makes_whole(func, leaves, kwargs) and _num_elements(args) <= _MOST_ELEMENTS


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the real result of an operator on host integers; floating-point results are fake again."""
    # A simulated accelerator pins no memory.
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with unset_fake_temporarily():
        result = func(*args, **kwargs)
    if fake is None:
        return result
    return tree_map_only(Tensor, lambda one: one if is_whole(one.dtype) else fake.from_tensor(one), result)


def numbers_of(tensor: Tensor) -> list[Any]:
    """Return the numbers of a real tensor, row by row."""
    with unset_fake_temporarily():
        numbers: list[Any] = tensor.ravel().tolist()
    return numbers


def tensor_of(numbers: list[Any], like: Tensor) -> Tensor:
    """Return a real tensor on the host, of the shape and dtype of another."""
    with unset_fake_temporarily():
        return torch.tensor(numbers, dtype=like.dtype).reshape(like.shape)


def write_numbers(tensor: Tensor, numbers: list[Any]) -> None:
    """Write numbers to a real tensor, in row-major order."""
    with unset_fake_temporarily():
        tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape))


def is_whole_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is a real one of integers or booleans on the host."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and tensor.device.type == "cpu" and is_whole(tensor.dtype)


def is_whole(dtype: torch.dtype) -> bool:
    """Return whether a dtype is of integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _makes_whole(func: Any, leaves: list[Any], kwargs: Any) -> bool:
    name = func._overloadpacket.__name__
    if (dtype := kwargs.get("dtype")) is not None:
        return is_whole(dtype)
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    return name in _DRAWN or (name in _OF_ARGUMENTS and not any(isinstance(one, float) for one in numbers))


def _num_elements(args: Any) -> int:
    """Return how many elements a factory makes, at most."""
    sizes = next((one for one in args if isinstance(one, list | tuple)), None)
    return math.prod(sizes) if sizes is not None else max((int(one) for one in args if type(one) is int), default=1)
