"""Integers that programs compute on the host, such as the order of a data set: computed for real, not traced.

Data loaders use them as indices and sizes. Floating-point tensors stay fake on the host too: whole models are built
there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

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
