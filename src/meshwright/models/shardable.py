"""Checks that a user's model can be sharded, before training, with messages in the model's own terms."""

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.contract import blocks_of
from meshwright.models.initial import Constant

_NUM_NAMED = 5


def require_shardable(model: nn.Module) -> None:
    """Raise ConfigError if `model`, as built, violates models/contract.py."""
    parameters = dict(model.named_parameters())
    others = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
    if others:
        raise ConfigError(
            f"{type(model).__name__} holds {_some(others)} in {parameters[others[0]].dtype}, but parameters are "
            "float32 as built, and precision.compute says in what they are computed: build the model in float32"
        )
    if scalars := [name for name, parameter in parameters.items() if parameter.dim() == 0]:
        raise ConfigError(
            f"{type(model).__name__} holds {_some(scalars)} without a dim, but parameters are sharded along dim 0: "
            "give it one, such as nn.Parameter(torch.ones(1))"
        )
    if across := _shared_across_units(model):
        raise ConfigError(
            f"{type(model).__name__} uses one parameter as {' and '.join(across)}, but each block is an FSDP unit of "
            "its own: share within a block or outside of all, or rename `blocks`, which makes the model one unit"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        _require_filled_buffers(model)


def _require_filled_buffers(model: nn.Module) -> None:
    unfilled = [name for name, _ in model.named_buffers() if not isinstance(model.initial(name), Constant)]  # type: ignore[operator]
    if unfilled:
        raise ConfigError(
            f"{type(model).__name__} has initial(fqn), and so is built without memory, but keeps {_some(unfilled)} as "
            "buffers, which nothing would fill: let initial return a Constant for them, compute them in forward, or "
            "leave initial out"
        )


def _shared_across_units(model: nn.Module) -> list[str]:
    """Return the names of a parameter that several FSDP units hold; [] if there is none."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    in_blocks: set[nn.Module] = set()
    for index, block in enumerate(blocks_of(model)):
        in_blocks.update(block.modules())
        for name, parameter in block.named_parameters():
            names.setdefault(parameter, {})[index] = f"blocks.{index}.{name}"
    for module_name, module in model.named_modules():
        if module not in in_blocks:
            for name, parameter in module.named_parameters(recurse=False):
                names.setdefault(parameter, {})[-1] = f"{module_name}.{name}".lstrip(".")
    return next((list(by_unit.values()) for by_unit in names.values() if len(by_unit) > 1), [])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
