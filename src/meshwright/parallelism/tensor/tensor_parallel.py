"""Tensor and sequence parallelism: each module of a model computes on this rank's shards of its parameters.

A parameter becomes a DTensor, which records its placement; its module reads it as the local shard, a plain tensor. So
models know no ranks, and no DTensor flows through a forward.

A replicated parameter gets a partial gradient on each rank, from that rank's shard of the sequence or of the heads:
gradients.py sums them.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.errors import InfeasibleLayout, UnsupportedError
from meshwright.log import logger
from meshwright.models.contract import blocks_of
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.parallelism.activation_checkpoint import checkpoints_of
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.layers import (
    AllGatherInput,
    AllGatherInputReduceScatterOutput,
    AllGatherOutput,
    RowwiseLinear,
    RowwiseLinearPartial,
    ShardedModule,
    SharedHeadLinear,
    VocabParallelEmbedding,
    change_class,
)
from meshwright.parallelism.tensor.sequence_roles import require_gathered_once
from meshwright.parallelism.tensor.sharding_plan import ShardingPlan, ShardingRole, sharding_plan_of
from meshwright.parallelism.torch_private.torch_compiler import has_symmetric_memory, pipeline_matmuls
from meshwright.parallelism.torch_private.torch_nccl import new_group_like
from meshwright.spec.step.adapter import LORA_A, LORA_B, MAGNITUDE, PACKED_BLOCK, PACKED_SCALE
from meshwright.spec.trace.timeline import SHARED_HEADS

_OUTPUTS: Mapping[str, int] = {"weight": 0, "bias": 0, PACKED_SCALE: 0, LORA_B: 0, MAGNITUDE: 0}
_INPUTS: Mapping[str, int] = {"weight": 1, PACKED_SCALE: 1, LORA_A: 1}
_SHARD_DIMS: Mapping[ShardingRole, Mapping[str, int]] = {
    "column": _OUTPUTS,
    "kv": _OUTPUTS,
    "per_head": {"weight": 0},
    "head": {"weight": 0, "bias": 0},
    "row": _INPUTS,
    "row_part": _INPUTS,
    "vocabulary": {"weight": 0},
}
"""The sharded dim of each sharded parameter; all others are replicated."""
_LAYERS: Mapping[ShardingRole, type[ShardedModule]] = {
    "gather": AllGatherInput,
    "gather_output": AllGatherOutput,
    "gather_sum": AllGatherInputReduceScatterOutput,
    "head": AllGatherInput,
    "row": RowwiseLinear,
    "row_part": RowwiseLinearPartial,
    "vocabulary": VocabParallelEmbedding,
}


def apply_tensor_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Shard `model` in place over "tp" by its sharding plan; a collective. No effect with tp = 1.

    `model` may be a stage of a pipeline, and on the meta device.
    """
    if meshes.degree("tp") == 1:
        return
    shard = _Sharder(meshes.axis("tp"))
    roles = _roles(model, sharding_plan_of(model, meshes.layout))
    for name, module, role in roles:
        shard(name, module, role, getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None))
    if not isinstance(model, GPT2 | Llama):
        require_gathered_once(model, roles)
    blocks = blocks_of(model)
    for index, checkpoint in checkpoints_of(blocks, meshes.layout):
        for part in blocks[index].modules():
            if isinstance(part, AllGatherInput):
                part.regathers_input = checkpoint == "none"


def apply_async_tensor_parallel(meshes: Meshes) -> None:
    """Let the compiler overlap matmuls with tp's collectives if layout.async_tp is set; call before compiling.

    In compiled blocks it fuses each all-gather or reduce-scatter of collectives.py with its matmul into one op on
    symmetric memory, which computes on the parts that have arrived. Without symmetric memory: a warning, no overlap.
    """
    if not meshes.layout.async_tp or meshes.degree("tp") == 1:
        return
    if has_symmetric_memory(meshes.device_type):
        pipeline_matmuls(meshes.group("tp"))
    elif dist.get_rank() == 0:
        logger.warning(
            "layout.async_tp = true has no effect on %s, which has no symmetric memory: matmuls wait for communication",
            meshes.device_type,
        )


def _roles(model: nn.Module, plan: ShardingPlan) -> list[tuple[str, nn.Module, ShardingRole | None]]:
    """Return (name, module, role or None) of each module outside of those with the role elsewhere."""
    roles: list[tuple[str, nn.Module, ShardingRole | None]] = []
    elsewhere: set[nn.Module] = set()
    for name, module in model.named_modules():
        role = next((role for pattern, role in plan.items() if fnmatchcase(name, pattern)), None)
        if role == "elsewhere":
            elsewhere.update(module.modules())
        if module not in elsewhere:
            roles.append((name, module, role))
    return roles


class _Sharder:
    """Callable that shards one module after another over `mesh`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placed: dict[nn.Parameter, nn.Parameter] = {}
        self._head_groups: dict[int, dist.ProcessGroup] = {}

    def __call__(self, name: str, module: nn.Module, role: ShardingRole | None, head_dim: int | None) -> None:
        """Shard `module` by `role`; `head_dim` is an attribute of its parent module."""
        layer = _LAYERS.get(role, ShardedModule) if role is not None else ShardedModule
        shard_dims = _SHARD_DIMS.get(role, {}) if role is not None else {}
        if shard_dims and role != "per_head":
            _require_kind(name, module, role)
        if role == "kv" and (num_sharing := _ranks_per_head(name, module, head_dim, self._mesh.size())) > 1:
            layer = SharedHeadLinear
            module.head_group = self._head_group(num_sharing)  # type: ignore[assignment]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in self._placed:
                self._placed[parameter] = self._place(f"{name}.{key}", parameter, shard_dims.get(key))
            module.register_parameter(key, self._placed[parameter])
        if layer is not ShardedModule or module._parameters:
            change_class(module, layer, self._mesh.get_group())

    def _place(self, fqn: str, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Return `parameter` as a DTensor, sharded along `dim` or replicated, without communication."""
        part = parameter.detach()
        if dim is not None:
            _require_even(fqn, dim, parameter.shape[dim], self._mesh.size())
            part = part.chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()].contiguous()
        placement = Replicate() if dim is None else Shard(dim)
        shape, stride = parameter.shape, parameter.stride()
        placed = DTensor.from_local(part, self._mesh, [placement], run_check=False, shape=shape, stride=stride)
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    def _head_group(self, num_ranks: int) -> dist.ProcessGroup:
        """Return the group of `num_ranks` consecutive ranks of the mesh that this rank is in."""
        if num_ranks not in self._head_groups:
            tp_group = self._mesh.get_group()
            ranks = dist.get_process_group_ranks(tp_group)
            first = self._mesh.get_local_rank() // num_ranks * num_ranks
            # Its name begins as DeviceMesh describes tp, so that profiles and traces count it there.
            name = f"mesh_tp{SHARED_HEADS}"
            self._head_groups[num_ranks] = new_group_like(tp_group, ranks[first : first + num_ranks], name)
        return self._head_groups[num_ranks]


def _ranks_per_head(name: str, module: nn.Module, head_dim: int | None, tp: int) -> int:
    """Return how many ranks share one key/value head; 1 where each rank has whole heads."""
    if head_dim is None:
        raise UnsupportedError(
            f"{name} has the role kv: its parent module must have the attribute head_dim, the width of one head; "
            "add it, or make the role column"
        )
    weight = module.weight
    assert isinstance(weight, Tensor)
    num_heads = weight.shape[0] // head_dim
    if num_heads % tp and tp % num_heads:
        valid = [n for n in range(1, 2 * max(tp, num_heads)) if num_heads % n == 0 or n % num_heads == 0]
        raise InfeasibleLayout(
            f"layout.tp = {tp}: must divide, or be a multiple of, the {num_heads} key/value heads of {name}; "
            f"set layout.tp to {_nearest(valid, tp)}"
        )
    return max(1, tp // num_heads)


def _require_even(fqn: str, dim: int, size: int, tp: int) -> None:
    if size % tp:
        valid = [n for n in range(1, size + 1) if size % n == 0]
        if fqn.endswith(PACKED_SCALE):
            # A model of the user's own: of ours the job's rules know the sizes.
            raise InfeasibleLayout(
                f"layout.tp = {tp}: must divide the {size} blocks of {PACKED_BLOCK} inputs in which adapter.base_dtype "
                f"keeps {fqn.removesuffix(f'.{PACKED_SCALE}')}; set layout.tp to {_nearest(valid, tp)}, or "
                'adapter.base_dtype to "bfloat16"'
            )
        raise InfeasibleLayout(
            f"layout.tp = {tp}: must divide dim {dim} of {fqn}, which is {size}; "
            f"set layout.tp to {_nearest(valid, tp)}, or change that size of the model"
        )


def _require_kind(name: str, module: nn.Module, role: ShardingRole | None) -> None:
    kind = nn.Embedding if role == "vocabulary" else nn.Linear
    if not isinstance(module, kind):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}: the role {role} needs an nn.{kind.__name__}; "
            "remove it from tensor_parallel, so that it is replicated on every rank"
        )
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
        raise UnsupportedError(
            f"{name} has padding_idx or max_norm, which an embedding sharded by rows does not support: "
            "build it without, or set layout.tp to 1"
        )


def _nearest(valid: list[int], value: int) -> str:
    nearest = sorted(valid, key=lambda n: abs(n - value))[:2]
    return " or ".join(str(n) for n in sorted(nearest))
