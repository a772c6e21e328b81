"""What is wrong with the roles of a user's table along the sequence: never gathered, or gathered twice in a row."""

from collections.abc import Sequence
from itertools import pairwise

from torch import distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.models.contract import blocks_of
from meshwright.parallelism.tensor.sharding_plan import ShardingRole

_SCATTER = ("row", "vocabulary")
"""Roles whose output is a shard of the sequence, of a whole one."""
_GATHER = ("gather", "gather_output", "gather_sum", "head")
"""Roles that all-gather the sequence."""
_PAGE = "(docs/how_to/own_model.md has a table that works)"


def require_gathered_once(model: nn.Module, roles: Sequence[tuple[str, nn.Module, ShardingRole | None]]) -> None:
    """Raise ConfigError for roles (name, module, role) of `model` that gather the sequence before a head, which does so
    itself; log a warning where nothing gathers what others shard.

    Modules outside of the blocks are compared in the order in which they are registered.
    """
    owner = f"{type(model).__name__}.tensor_parallel"
    in_blocks = set(blocks_of(model).modules())
    ends = [
        (name, role)
        for name, module, role in roles
        if module not in in_blocks and (role is not None or module._parameters)
    ]
    for (name, role), (next_name, next_role) in pairwise(ends):
        if (role, next_role) == ("gather_output", "head"):
            raise ConfigError(
                f"{owner}: {name} has the role gather_output and {next_name} after it the role head, which gathers the "
                f"sequence, too: remove {name} from the table, or make {next_name} column {_PAGE}"
            )
    scatters = next((name for name, _, role in roles if role in _SCATTER), None)
    is_gathered = any(role in _GATHER for _, _, role in roles)
    if scatters is not None and not is_gathered and dist.get_rank() == 0:
        logger.warning(
            "%s: the output of %s is sharded along the sequence, and no role gathers it, so that sizes may not match: "
            "other layers may need the roles vocabulary (the embedding), gather_output or gather (before column "
            "layers) and head (the last layer) %s",
            owner,
            scatters,
            _PAGE,
        )
