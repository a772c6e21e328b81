"""Update groups: parameters that one optimizer updates with one weight decay and one share of the learning rate."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from meshwright.errors import ConfigError
from meshwright.spec.job.rules.optimizer_rules import group_problems
from meshwright.spec.job.sections import OptimizerName, OptimizerSection

_BLOCKS = "blocks."


class Rule(NamedTuple):
    """What a job says of a parameter."""

    optimizer: OptimizerName
    weight_decay: float
    learning_rate_ratio: float


def update_groups(
    named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection
) -> Iterator[tuple[Rule, list[nn.Parameter]]]:
    """Yield the parameters of each rule, in order of first appearance; matrices, which decay, come first."""
    by_rule: dict[Rule, list[nn.Parameter]] = {}
    for name, parameter in sorted(named, key=lambda each: not is_matrix(*each)):
        by_rule.setdefault(_rule_of(name, parameter, section), []).append(parameter)
    yield from by_rule.items()


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has rows and columns: two dims or more, and no bias of stacked experts."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def require_updatable(section: OptimizerSection, model: nn.Module) -> None:
    """Raise ConfigError if the whole model has nothing to train, a pattern of optimizer.groups no parameters of it, or
    Muon no matrix.
    """
    # Frozen ones are updated by none.
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ConfigError(
            "the model has no trainable parameters, but the optimizer needs one: assign an nn.Parameter, or modules "
            "that hold some, to the model in its constructor"
        )
    if section.name == "muon" and not any(is_block_matrix(name, parameter) for name, parameter in named.items()):
        raise ConfigError(
            'optimizer.name = "muon" updates the matrices of blocks, and the model has none: name the repeated layers '
            'blocks (models/contract.py), or set optimizer.name to "adamw"'
        )
    if problems := [*group_problems(section, [*named])]:
        raise ConfigError("\n".join(problems))


def _rule_of(name: str, parameter: nn.Parameter, section: OptimizerSection) -> Rule:
    optimizer: OptimizerName = "muon" if section.name == "muon" and is_block_matrix(name, parameter) else "adamw"
    group = next((one for one in section.groups if fnmatchcase(name, one.match)), None)
    decay = section.weight_decay if is_matrix(name, parameter) else 0.0
    if group is None:
        return Rule(optimizer, decay, 1.0)
    own = section.weight_decay if group.weight_decay is None else group.weight_decay
    return Rule(optimizer, own, group.learning_rate_ratio)


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates a parameter: the embedding and the head are tables of tokens, left to AdamW."""
    return name.startswith(_BLOCKS) and is_matrix(name, parameter)
