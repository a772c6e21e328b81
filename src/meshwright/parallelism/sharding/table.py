"""table_of(model): where the table of a model comes from."""

from fnmatch import fnmatchcase
from typing import cast, get_args

from torch import nn

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.parallelism.sharding.gpt2 import GPT2_TABLE
from meshwright.parallelism.sharding.llama import LLAMA
from meshwright.parallelism.sharding.moe import moe_table
from meshwright.parallelism.sharding.role import Role, Table
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.moe_architecture import MoEArchitecture


def table_of(model: nn.Module, layout: Layout) -> Table:
    """Return our table for one of our models, and the attribute `tensor_parallel` of any other.

    Raises UnsupportedError where a model has none, and ConfigError where it is no table, or, if the model is whole and
    no stage of a pipeline, where it names what is not there.
    """
    if isinstance(model, GPT2):
        return GPT2_TABLE
    if isinstance(model, Llama):
        architecture = model.architecture
        return moe_table(architecture, layout.etp) if isinstance(architecture, MoEArchitecture) else LLAMA
    name, table = type(model).__name__, getattr(model, "tensor_parallel", None)
    if table is None:
        raise UnsupportedError(
            f"layout.tp > 1 needs to know how each layer is cut, but {name} has no tensor_parallel: give the class one "
            '(see meshwright/models/contract.py), such as tensor_parallel = {"blocks.*.up": "column", ...}, '
            "or set layout.tp to 1"
        )
    roles = list(table.values()) if isinstance(table, dict) else [table]
    if wrong := [role for role in roles if role not in get_args(Role)]:
        raise ConfigError(
            f"{name}.tensor_parallel holds {wrong[0]!r}, but it gives a role to each pattern of module names: "
            f"make it a dict with values out of {', '.join(get_args(Role))}"
        )
    names = [name for name, _ in model.named_modules()]
    unused = [pattern for pattern in table if not any(fnmatchcase(name, pattern) for name in names)]
    if unused and layout.pp == 1:
        raise ConfigError(
            f"{name}.tensor_parallel names {unused[0]!r}, but no module of the model matches it, out of "
            f"{', '.join(names[1:5])}, ...: correct the pattern"
        )
    return cast(Table, table)
