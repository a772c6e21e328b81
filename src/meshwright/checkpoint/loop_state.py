"""LoopState: what a training loop of your own saves, as tensors and plain values, and back.

    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}

Modules and optimizers are opened by parameter names, so that another number of ranks or another sharding can load them.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
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
        self._optimizers: list[str] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        """Nested tensors by section, without sections of plain values."""
        for key, value in state.items():
            _require_name(key, key)
            if isinstance(value, Tensor):
                self.tensors[key] = {_ALONE: value}
                continue
            content = self._opened(key, value, state)
            if not _is_split(content):
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
        self._require_groups(saved)
        for path in own:
            container, key = self._places[path]
            container[key] = _like(container[key], saved[path])
        for load in self._loads:
            load()

    def _require_groups(self, saved: Mapping[str, Any]) -> None:
        """Raise CheckpointError where a parameter would get the learning rate of another group."""
        for key in self._optimizers:
            groups = f"{key}/param_groups"
            if [each["params"] for each in saved[groups]] != [each["params"] for each in self._values[groups]]:
                raise CheckpointError(
                    f"the checkpoint has other parameter groups of {key}: give the optimizer the groups, and their "
                    "parameters, in the order in which they were saved"
                )

    def _opened(self, key: str, value: Any, state: Mapping[str, Any]) -> Any:
        if isinstance(value, Optimizer):
            module = _owner(value, state)
            of_optimizer = get_optimizer_state_dict(module, value)
            self._loads.append(lambda: set_optimizer_state_dict(module, value, of_optimizer))
            self._optimizers.append(key)
            return of_optimizer
        if isinstance(value, nn.Module):
            # Without the prefixes of torch.compile and DDP.
            of_module = get_model_state_dict(value)
            self._loads.append(lambda: set_model_state_dict(value, of_module))
            return of_module
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
            elif _is_split(value):
                if nested := self._split(value, f"{path}/{name}"):
                    tensors[name] = nested
            else:
                self._add_value(f"{path}/{name}", content, key, value)
        return tensors

    def _add_value(self, path: str, container: Any, key: Any, value: Any) -> None:
        if (problem := _json_problem(value)) is not None:
            raise ConfigError(
                f"state has {problem} at {path}, which is neither a tensor nor JSON: save it as one of these, such as "
                "a dict of tensors or what its state_dict or get_state returns, or leave it out"
            )
        self._values[path] = value
        self._places[path] = container, key


def _owner(optimizer: Optimizer, state: Mapping[str, Any]) -> nn.Module:
    """Return the module or modules in `state` whose parameters `optimizer` updates, by which its state is named."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owned = {
        key: ids & updated
        for key, module in state.items()
        if isinstance(module, nn.Module) and (ids := {id(parameter) for parameter in module.parameters()}) & updated
    }
    for key, ids in owned.items():
        if ids == updated:
            found: nn.Module = state[key]
            return found
    if set().union(*owned.values()) == updated:
        return nn.ModuleDict({key: state[key] for key in owned})
    raise ConfigError(
        f"state has {type(optimizer).__name__}, but no modules that have all of its parameters: add them, whose "
        'names its state is saved under: {"model": model, "optimizer": optimizer}'
    )


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
    return f"a {type(value).__name__}"


def _like(present: Any, saved: Any) -> Any:
    """Return what JSON made of a value with the tuples that `present` has."""
    if isinstance(present, tuple) and isinstance(saved, list):
        return tuple(_like(old, new) for old, new in zip(present, saved, strict=False)) if present else tuple(saved)
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_like(old, new) for old, new in zip(present, saved, strict=True)]
    if isinstance(present, Mapping) and isinstance(saved, Mapping):
        return {key: _like(present.get(key), value) for key, value in saved.items()}
    return saved
