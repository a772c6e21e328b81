"""LoopState: what a training loop of your own saves, as tensors and plain values, and back.

    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}

Modules and optimizers are opened by parameter names, so that another number of ranks or another sharding can load them.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.checkpoint.loop.optimizer_state import OptimizerState
from meshwright.errors import CheckpointError, ConfigError
from meshwright.parallelism.torch_private.torch_compat import state_dict_fqn
from meshwright.units import first_of

_ALONE = "value"
"""Name of a tensor that is a section by itself."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, DTensor)


class LoopState:
    """The opened state: its tensors are those of the objects, and are filled in place."""

    def __init__(self, state: MutableMapping[str, Any], *, is_filled: bool = False) -> None:
        """Open modules, optimizers and whatever has state_dict and load_state_dict, to be saved, or to be filled.

        Raises ConfigError, by its path, for what cannot be.
        """
        if not hasattr(state, "items"):
            what = type(state).__name__
            raise ConfigError(f'state is a {what}, and must be a dict of names: {{"model": model, "epoch": 0}}')
        self._problem_of = filling_problem if is_filled else saving_problem
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[Any, Any]] = {}
        self._loads: list[Callable[[], object]] = []
        self._sections = set(state)
        self._modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        self._optimizers: dict[str, OptimizerState] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        """Nested tensors by section, without sections of plain values."""
        self.buffers: set[str] = set()
        """Paths of the modules' buffers."""
        for key, value in state.items():
            _require_name(key, key)
            try:
                self._open(key, value, state)
            except RecursionError:
                raise ConfigError(f"state contains itself, or is nested too deeply, at {key}: save its parts") from None

    @property
    def values(self) -> dict[str, Any]:
        """Return the plain values by path, such as epoch; an optimizer's are one value."""
        return self._values | {key: optimizer.values() for key, optimizer in self._optimizers.items()}

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Make ready for what a checkpoint with these values holds; raises CheckpointError for another state's."""
        own, here = self._own(saved), self._values.keys() | self._optimizers.keys()
        problems = {"lacks": here - own, "holds unknown": own - here}
        if found := [f"{what} {first_of(sorted(paths))}" for what, paths in problems.items() if paths]:
            raise CheckpointError(
                f"the checkpoint {'; '.join(found)} among its plain values: load a state with the keys that were saved"
            )
        for key, optimizer in self._optimizers.items():
            self.tensors.pop(key, None)
            if tensors := optimizer.expect(saved[key]):
                self.tensors[key] = {"state": tensors}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Put saved values in place and let the objects load, once `tensors` are filled."""
        for path in self._own(saved) - self._optimizers.keys():
            container, key = self._places[path]
            container[key] = _like(container[key], saved[path])
        for key, optimizer in self._optimizers.items():
            optimizer.take(saved[key], _like)
        for load in self._loads:
            load()

    def _own(self, saved: Mapping[str, Any]) -> set[str]:
        return {path for path in saved if path.partition("/")[0] in self._sections}

    def _open(self, key: str, value: Any, state: MutableMapping[str, Any]) -> None:
        if isinstance(value, Optimizer):
            self._optimizers[key] = OptimizerState(key, value, self._modules)
            if tensors := self._optimizers[key].tensors():
                self.tensors[key] = {"state": self._split(tensors, f"{key}/state")}
            return
        if isinstance(value, Tensor):
            self._require_tensor(value, key)
            self.tensors[key] = {_ALONE: value}
            return
        content = self._content(key, value)
        if not _is_split(content):
            self._add_value(key, state, key, content)
        elif tensors := self._split(content, key):
            self.tensors[key] = tensors

    def _content(self, key: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            if any(isinstance(module, FullyShardedDataParallel) for module in value.modules()):
                raise ConfigError(
                    f"state has FullyShardedDataParallel at {key}, whose flat parameters have no names: use fully_shard"
                )
            # Without the prefixes of torch.compile and DDP.
            of_module = get_model_state_dict(value)
            self.buffers |= {f"{key}/{name}" for name in of_module} - {
                f"{key}/{state_dict_fqn(value, name)}" for name, _ in value.named_parameters(remove_duplicate=False)
            }
            self._loads.append(lambda: set_model_state_dict(value, of_module))
            return of_module
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type):
            content = value.state_dict()
            self._loads.append(lambda: value.load_state_dict(content))
            return content
        return value

    def _split(self, content: Mapping[Any, Any] | list[Any], path: str) -> dict[str, Any]:
        """Return the tensors in `content`, nested, and keep its plain values."""
        tensors: dict[str, Any] = {}
        names: dict[str, Any] = {}
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            name = str(key)
            _require_name(name, path)
            if name in names:
                raise ConfigError(f"state has the keys {names[name]!r} and {key!r} at {path}, one name: rename one")
            names[name] = key
            if isinstance(value, Tensor):
                self._require_tensor(value, f"{path}/{name}")
                tensors[name] = value
            elif _is_split(value):
                if nested := self._split(value, f"{path}/{name}"):
                    tensors[name] = nested
            else:
                self._add_value(f"{path}/{name}", content, key, value)
        return tensors

    def _require_tensor(self, tensor: Tensor, path: str) -> None:
        if (problem := self._problem_of(tensor)) is not None:
            raise ConfigError(f"state has at {path} {problem}")

    def _add_value(self, path: str, container: Any, key: Any, value: Any) -> None:
        if (problem := _json_problem(value)) is not None:
            raise ConfigError(
                f"state has {problem} at {path}, which is neither a tensor nor JSON: save it as one of these, such as "
                "a dict of tensors or what its state_dict or get_state returns, or leave it out"
            )
        self._values[path] = value
        self._places[path] = container, key


def _require_name(name: str, path: str) -> None:
    if not isinstance(name, str) or "/" in name:
        raise ConfigError(f"state has the key {name!r} at {path}, but keys are strings without a slash: rename it")


def _is_split(value: Any) -> bool:
    """Return whether a value is saved item by item; other lists are saved as one value, and may grow."""
    return isinstance(value, Mapping) or (isinstance(value, list) and _needs_split(value))


def _needs_split(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(not isinstance(key, str) for key in value) or any(map(_needs_split, value.values()))
    return any(map(_needs_split, value)) if isinstance(value, list) else isinstance(value, Tensor)


def _json_problem(value: Any) -> str | None:
    """Return what in `value` JSON does not hold, None where it holds all."""
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return next((found for each in value.values() if (found := _json_problem(each)) is not None), None)
    if isinstance(value, list) or type(value) is tuple:
        return next((found for each in value if (found := _json_problem(each)) is not None), None)
    if isinstance(value, type):
        return f"the class {value.__qualname__} instead of an object of it"
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _like(present: Any, saved: Any) -> Any:
    """Return what JSON made of a value with the tuples that `present` has."""
    if isinstance(present, tuple) and isinstance(saved, list):
        return tuple(_like(old, new) for old, new in zip(present, saved, strict=False)) if present else tuple(saved)
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_like(old, new) for old, new in zip(present, saved, strict=True)]
    if isinstance(present, Mapping) and isinstance(saved, Mapping):
        return {key: _like(present.get(key), value) for key, value in saved.items()}
    return saved


def saving_problem(tensor: Tensor) -> str | None:
    """Return why the bytes of `tensor` are not all there is to it, and what to save instead; None if they are."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return "a DTensor with partial sums, which no rank has added up: redistribute it to Replicate() or Shard()"
        tensor = tensor.to_local()
    if tensor.is_nested:
        return "a nested tensor: save its values() and offsets()"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}: save its indices() and values(), or to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values: make it with to_empty(device=...) first"
    if tensor.is_quantized:
        return "a quantized tensor, whose scale would be lost: save int_repr(), q_scale() and q_zero_point()"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated view: save resolve_conj() or resolve_neg() of it"
    if type(tensor) not in _PLAIN:
        return f"a {type(tensor).__name__}, a tensor class whose other parts would be lost: save its inner tensors"
    return None


def filling_problem(tensor: Tensor) -> str | None:
    """Return why a load cannot fill `tensor` in place, None where it can."""
    if (problem := saving_problem(tensor)) is not None:
        return problem
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return "a view of which several elements share their memory: clone() it first" if _overlaps(local) else None


def _overlaps(tensor: Tensor) -> bool:
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride < end:
                return True
            end += stride * (size - 1)
    return False
