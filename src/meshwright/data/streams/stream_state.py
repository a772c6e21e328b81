"""A user's state_dict() as JSON and back, so that it is part of a checkpoint's metadata and nothing is unpickled.

What JSON holds is kept as it is. Anything else is {"type": ..., "value": ...}: a tuple, bytes, an array, a tensor, a
dict with keys that are not text, or that itself has the keys type and value.
"""

import base64
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from meshwright.errors import DataError

_TYPE, _VALUE = "type", "value"
_ADVICE: Final = "a state may have numbers, text, bytes, None, lists, tuples, dicts, NumPy arrays and tensors"


def encoded(value: Any, path: str = "state_dict()") -> Any:
    """Return `value` as JSON, a copy; raises DataError that names the `path` of what cannot be saved."""
    match value:
        case None | bool() | int() | float() | str():
            return value.item() if isinstance(value, np.generic) else value
        case list():
            return [encoded(inner, f"{path}[{place}]") for place, inner in enumerate(value)]
        case tuple():
            return _typed("tuple", [encoded(inner, f"{path}[{place}]") for place, inner in enumerate(value)])
        case bytes() | bytearray():
            return _typed("bytes", base64.b64encode(value).decode())
        case np.generic():
            return _typed("scalar", _of_array(np.asarray(value), path))
        case np.ndarray():
            return _typed("array", _of_array(value, path))
        case torch.Tensor():
            dense = value.detach().cpu().contiguous()
            data = dense.reshape(-1).view(torch.uint8).numpy()
            dtype = str(value.dtype).removeprefix("torch.")
            return _typed("tensor", [dtype, list(value.shape), base64.b64encode(data.tobytes()).decode()])
        case Mapping():
            if all(isinstance(key, str) for key in value) and value.keys() != {_TYPE, _VALUE}:
                return {key: encoded(inner, f"{path}[{key!r}]") for key, inner in value.items()}
            pairs = (
                [encoded(key, f"a key of {path}"), encoded(inner, f"{path}[{key!r}]")] for key, inner in value.items()
            )
            return _typed("dict", [*pairs])
    raise DataError(
        f"{path} of the object in data.source is a {type(value).__name__}, which a checkpoint cannot hold: {_ADVICE}"
    )


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TYPE, _VALUE}:
        return {key: decoded(inner) for key, inner in value.items()}
    inner = value[_VALUE]
    match value[_TYPE]:
        case "tuple":
            return tuple(decoded(one) for one in inner)
        case "bytes":
            return base64.b64decode(inner)
        case "array":
            return _to_array(inner)
        case "scalar":
            return _to_array(inner)[()]
        case "tensor":
            dtype, shape, data = inner
            flat = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
            return flat[: len(base64.b64decode(data))].view(getattr(torch, dtype)).reshape(shape)
        case _:
            return {decoded(key): decoded(one) for key, one in inner}


def _typed(kind: str, value: Any) -> dict[str, Any]:
    return {_TYPE: kind, _VALUE: value}


def _of_array(array: np.ndarray[Any, Any], path: str) -> list[Any]:
    if array.dtype.hasobject:
        raise DataError(f"{path} of the object in data.source is an array of Python objects: {_ADVICE}")
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _to_array(value: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
