"""OptimizerState: what an optimizer holds now, under the names of its parameters, and back.

torch's own functions for this make the state of parameters that have none, by a step without gradients: an optimizer
that was only asked for its state would count one step more. Here nothing is made but what a checkpoint holds.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.format.dtypes import dtype_name, torch_dtype
from meshwright.errors import CheckpointError, ConfigError
from meshwright.parallelism.torch_private.torch_compat import state_dict_fqn

_PARAMS = "params"


class OptimizerState:
    """An optimizer by the names that the modules of the same state give its parameters."""

    def __init__(self, key: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError where no module has all parameters, and for state that is no tensor of a parameter."""
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ConfigError(
                f"state has a ZeroRedundancyOptimizer at {key}, whose state is split by its own rules: shard the model "
                "by fully_shard and use a plain optimizer, or save what its consolidate_state_dict returns"
            )
        self._key, self._optimizer = key, optimizer
        self._parameters = _named_parameters(optimizer, modules)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._loading: dict[str, dict[str, Any]] = {}
        if len(optimizer.state.keys() - set(self._parameters.values())) > 0:
            raise ConfigError(
                f"{type(optimizer).__name__} at {key} keeps state that belongs to no parameter, and so has no name: "
                "save its state_dict with torch.save, or leave it out"
            )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each parameter's state by name, those that exist."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            own = self._optimizer.state.get(parameter, {})
            if tensors := {str(key): value for key, value in own.items() if isinstance(value, Tensor)}:
                found[name] = tensors
        return found

    def values(self) -> dict[str, Any]:
        """Return all else, as JSON: the class, the groups, and of each parameter what its state is made of."""
        return {
            "class": type(self._optimizer).__name__,
            "param_groups": [self._group(group) for group in self._optimizer.param_groups],
            "state": {
                name: {str(key): self._described(name, key, value) for key, value in own.items()}
                for name, parameter in self._parameters.items()
                if (own := self._optimizer.state.get(parameter, {}))
            },
        }

    def expect(self, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to fill for the saved values; raises CheckpointError for those of another optimizer."""
        own_class = type(self._optimizer).__name__
        if saved["class"] != own_class:
            raise CheckpointError(f"{self._key} was saved from {saved['class']} and is {own_class} here")
        groups = [group[_PARAMS] for group in saved["param_groups"]]
        if groups != [self._group(group)[_PARAMS] for group in self._optimizer.param_groups]:
            raise CheckpointError(
                f"the checkpoint has other parameter groups of {self._key}: give the optimizer the groups, and their "
                "parameters, in the order in which they were saved"
            )
        self._loading = {
            name: {key: self._target(name, key, kind) for key, kind in kinds.items()}
            for name, kinds in saved["state"].items()
            if name in self._parameters
        }
        return {
            name: tensors
            for name, own in self._loading.items()
            if (tensors := {key: value for key, value in own.items() if isinstance(value, Tensor)})
        }

    def take(self, saved: Mapping[str, Any], like: Callable[[Any, Any], Any]) -> None:
        """Let the optimizer have what was loaded and nothing else; `like` gives a value the types of the present."""
        for name, parameter in self._parameters.items():
            if name in self._loading:
                self._optimizer.state[parameter] = self._loading[name]
            else:
                self._optimizer.state.pop(parameter, None)
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            for key, value in values.items():
                if key != _PARAMS and isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key != _PARAMS:
                    group[key] = like(group.get(key), value)

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        return plain | {_PARAMS: [self._names[id(parameter)] for parameter in group[_PARAMS]]}

    def _described(self, name: str, key: Any, value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor):
            if value is None or isinstance(value, bool | int | float | str):
                return {"value": value}
            raise ConfigError(
                f"{type(self._optimizer).__name__} at {self._key} keeps a {type(value).__name__} as {key} of {name}, "
                "and only tensors and single values can be saved: save its state_dict with torch.save, or leave it out"
            )
        is_like = value.shape == self._parameters[name].shape
        return {
            "dtype": dtype_name(value.dtype),
            "shape": None if is_like else list(value.shape),
            "is_on_cpu": value.device.type == "cpu",
        }

    def _target(self, name: str, key: str, kind: Mapping[str, Any]) -> Any:
        if "value" in kind:
            return kind["value"]
        parameter, dtype = self._parameters[name], torch_dtype(kind["dtype"])
        shape = parameter.shape if kind["shape"] is None else torch.Size(kind["shape"])
        present = self._optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, Tensor) and (present.shape, present.dtype) == (shape, dtype):
            return present
        if kind["shape"] is None:
            return torch.empty_like(parameter, dtype=dtype)
        return torch.empty(shape, dtype=dtype, device="cpu" if kind["is_on_cpu"] else parameter.device)


def _named_parameters(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by their names in one module, or with that of the module before them."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group[_PARAMS]}
    owned = {
        key: named
        for key, module in modules.items()
        if (named := {name: each for name, each in module.named_parameters() if id(each) in updated})
    }
    for key, named in owned.items():
        if {id(each) for each in named.values()} == updated:
            return {state_dict_fqn(modules[key], name): each for name, each in named.items()}
    found = {
        f"{key}.{state_dict_fqn(modules[key], name)}": each
        for key, named in owned.items()
        for name, each in named.items()
    }
    if {id(each) for each in found.values()} == updated:
        # A parameter that two modules share has the first one's name.
        first = {id(each): name for name, each in reversed(found.items())}
        return {name: each for name, each in found.items() if first[id(each)] == name}
    raise ConfigError(
        f"state has {type(optimizer).__name__}, but no modules that have all of its parameters: add them, whose names "
        'its state is saved under: {"model": model, "optimizer": optimizer}'
    )
