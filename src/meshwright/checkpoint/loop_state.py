"""LoopState: what a training loop of your own saves, as tensors and plain values, and back.

    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}

Modules and optimizers are opened by parameter names, so that another number of ranks or another sharding can load them.
"""

import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, ConfigError
from meshwright.units import first_of

_ALONE = "value"
"""Name of a tensor that is a section by itself."""


class LoopState:
    """The opened state: its tensors are those of the objects, and are filled in place."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        """Open modules, optimizers and whatever has state_dict and load_state_dict; raises ConfigError for the rest."""
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[Any, Any]] = {}
        self._loads: list[Callable[[], object]] = []
        self._sections = set(state)
        self.tensors: dict[str, dict[str, Any]] = {}
        """Nested tensors by section, without sections of plain values."""
        for key, value in state.items():
            _require_name(key, key)
            if isinstance(value, Tensor):
                self.tensors[key] = {_ALONE: value}
                continue
            content = self._opened(value, state)
            if not isinstance(content, Mapping):
                self._add_value(key, state, key, content)
            elif tensors := self._split(content, key):
                self.tensors[key] = tensors

    @property
    def values(self) -> dict[str, Any]:
        """Return the plain values by path, such as optimizer/param_groups."""
        return self._values

    def take(self, saved: Mapping[str, Any]) -> None:
        """Put saved values in place and let the objects load; raises CheckpointError for values of another state."""
        own = {path for path in saved if path.partition("/")[0] in self._sections}
        problems = {"lacks": self._values.keys() - own, "holds unknown": own - self._values.keys()}
        if found := [f"{what} {first_of(sorted(paths))}" for what, paths in problems.items() if paths]:
            raise CheckpointError(f"the checkpoint {'; '.join(found)}: load a state with the keys that were saved")
        for path in own:
            container, key = self._places[path]
            container[key] = _like(container[key], saved[path])
        for load in self._loads:
            load()

    def _opened(self, value: Any, state: Mapping[str, Any]) -> Any:
        if isinstance(value, Optimizer):
            module = _owner(value, state)
            of_optimizer = get_optimizer_state_dict(module, value)
            self._loads.append(lambda: set_optimizer_state_dict(module, value, of_optimizer))
            return of_optimizer
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            content = value.state_dict()
            self._loads.append(lambda: value.load_state_dict(content))
            return content
        return value

    def _split(self, content: Mapping[Any, Any] | list[Any], path: str) -> dict[str, Any]:
        """Return the tensors in `content`, nested, and keep its plain values."""
        tensors: dict[str, Any] = {}
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            name = str(key)
            _require_name(name, path)
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, Mapping) or (isinstance(value, list) and _has_tensors(value)):
                if nested := self._split(value, f"{path}/{name}"):
                    tensors[name] = nested
            else:
                self._add_value(f"{path}/{name}", content, key, value)
        return tensors

    def _add_value(self, path: str, container: Any, key: Any, value: Any) -> None:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"state has a {type(value).__name__} at {path}, which is neither a tensor nor JSON ({error}): "
                "save it as one of these, or leave it out"
            ) from None
        self._values[path] = value
        self._places[path] = container, key


def _owner(optimizer: Optimizer, state: Mapping[str, Any]) -> nn.Module:
    """Return the module in `state` whose parameters `optimizer` updates, by which its state is named."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in state.values():
        if isinstance(module, nn.Module) and updated <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise ConfigError(
        f"state has {type(optimizer).__name__}, but no module that has all of its parameters: add the module, whose "
        'names its state is saved under: {"model": model, "optimizer": optimizer}'
    )


def _require_name(name: str, path: str) -> None:
    if not isinstance(name, str) or "/" in name:
        raise ConfigError(f"state has the key {name!r} at {path}, but keys are strings without a slash: rename it")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


def _like(present: Any, saved: Any) -> Any:
    """Return what JSON made of a value with the tuples that `present` has."""
    if isinstance(present, tuple) and isinstance(saved, list):
        return tuple(_like(old, new) for old, new in zip(present, saved, strict=False)) if present else tuple(saved)
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_like(old, new) for old, new in zip(present, saved, strict=True)]
    if isinstance(present, Mapping) and isinstance(saved, Mapping):
        return {key: _like(present.get(key), value) for key, value in saved.items()}
    return saved
