"""How tensor parallelism shards each model: the role of each module, by a pattern of its name.

x is [batch, sequence, width]. Between the parts of a block each rank holds a shard of the sequence (sequence
parallelism); within them, the whole sequence and a shard of the width.

Experts are sharded by expert_parallel.py. With etp = 1 each rank routes the tokens of its own shard of the sequence,
which is all-gathered for the shared experts only. With etp = tp the whole mixture runs on the gathered sequence, and
each of its outputs is a partial sum.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

from torch import nn

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.moe_architecture import MoEArchitecture

ShardingRole = Literal[
    "gather",
    "gather_output",
    "gather_sum",
    "column",
    "kv",
    "per_head",
    "row",
    "row_part",
    "vocabulary",
    "head",
    "elsewhere",
]
"""
gather          no parameters of its own: its first input is all-gathered along the sequence
gather_output   its parameters are replicated; its output is all-gathered along the sequence
gather_sum      gather; its output, a partial sum, is reduce-scattered along the sequence
column          a linear layer sharded by output features
kv              column for key and value heads: ranks that share a head all-gather its weight
per_head        one weight for each query head, sharded as column shards the heads
row             a linear layer sharded by input features: its output is reduce-scattered along the sequence
row_part        row without the reduction, which an enclosing gather_sum module does
vocabulary      an embedding sharded by rows: its output is reduce-scattered along the sequence
head            gather and column: the logits, sharded along the vocabulary
elsewhere       skipped with all its submodules: another parallelism shards it
"""

ShardingPlan = Mapping[str, ShardingRole]
"""Role of each module whose name matches an fnmatch pattern. Parameters of all other modules are replicated."""

_ENDS: ShardingPlan = {
    "embedding": "vocabulary",
    # Not gather on the head: with a tied embedding there is no head module.
    "norm": "gather_output",
    "head": "column",
}
_ATTENTION: ShardingPlan = {
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "kv",
    "blocks.*.attention.value": "kv",
    "blocks.*.attention.sinks": "per_head",
    "blocks.*.attention.output": "row",
}
# Heads are sharded; every rank computes the latents.
_LATENT_ATTENTION: ShardingPlan = {
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.query_up": "column",
    "blocks.*.attention.kv_up": "column",
    "blocks.*.attention.output": "row",
}
_FFN_LINEARS: ShardingPlan = {
    "blocks.*.ffn.gate": "column",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
}
_LLAMA: ShardingPlan = {**_ENDS, **_ATTENTION, "blocks.*.ffn": "gather", **_FFN_LINEARS}
_GPT2: ShardingPlan = {
    **_ENDS,
    # Sharded along the sequence like the tokens' embedding, to which it is added.
    "positions": "vocabulary",
    **_ATTENTION,
    "blocks.*.ffn": "gather",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
}
_MIXTURE: ShardingPlan = {
    "blocks.*.ffn.shared": "gather",
    "blocks.*.ffn.shared.gate": "column",
    "blocks.*.ffn.shared.up": "column",
    "blocks.*.ffn.shared.down": "row",
    "blocks.*.ffn.experts": "elsewhere",
}
_GATHERED_MIXTURE: ShardingPlan = {
    "blocks.*.ffn.shared.gate": "column",
    "blocks.*.ffn.shared.up": "column",
    "blocks.*.ffn.shared.down": "row_part",
    "blocks.*.ffn.experts": "elsewhere",
    "blocks.*.ffn": "gather_sum",
}


def sharding_plan_of(model: nn.Module, layout: Layout) -> ShardingPlan:
    """Return the plan of a built-in model, or the `tensor_parallel` attribute of any other.

    Raises UnsupportedError for a model without a plan, ConfigError for an invalid plan. A pattern that matches no
    module is invalid too, but in a stage of a pipeline, which lacks other stages' modules.
    """
    if isinstance(model, GPT2):
        return _GPT2
    if isinstance(model, Llama):
        architecture = model.architecture
        return _moe_plan(architecture, layout.etp) if isinstance(architecture, MoEArchitecture) else _LLAMA
    name, plan = type(model).__name__, getattr(model, "tensor_parallel", None)
    if plan is None:
        raise UnsupportedError(
            f"layout.tp = {layout.tp}: {name} has no attribute tensor_parallel, which says how each layer is sharded; "
            'add one, such as tensor_parallel = {"blocks.*.up": "column", ...} (see meshwright/models/contract.py), '
            "or set layout.tp to 1"
        )
    roles = list(plan.values()) if isinstance(plan, dict) else [plan]
    if wrong := [role for role in roles if role not in get_args(ShardingRole)]:
        raise ConfigError(
            f"{name}.tensor_parallel holds {wrong[0]!r}: must be a dict from patterns of module names to roles; use "
            f"the roles {', '.join(get_args(ShardingRole))}"
        )
    names = [name for name, _ in model.named_modules()]
    unused = [pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in names)]
    if unused and layout.pp == 1:
        raise ConfigError(
            f"{name}.tensor_parallel names {unused[0]!r}, which matches no module of the model "
            f"({', '.join(names[1:5])}, ...): correct the pattern"
        )
    return cast(ShardingPlan, plan)


def _moe_plan(architecture: MoEArchitecture, etp: int) -> ShardingPlan:
    """Return the plan of `architecture` for tp > 1 and `etp`, which is 1 or tp. The first pattern that matches wins."""
    dense: ShardingPlan = {f"blocks.{index}.ffn": "gather" for index in range(architecture.num_dense_layers)}
    mixtures = _MIXTURE if etp == 1 else _GATHERED_MIXTURE
    attention = _ATTENTION if architecture.latent is None else _LATENT_ATTENTION
    return {**dense, **_FFN_LINEARS, **mixtures, **attention, **_ENDS}
