"""Tensor and sequence parallelism: each module of a model computes on this rank's part of its parameters.

A parameter becomes a DTensor, which says where its part lies; its module reads it as the part, a plain tensor. So
models know no ranks, and no DTensor flows through a forward.

A parameter that is whole on every rank gets a part of its gradient on each, because each sees a share of the sequence
or of the heads: gradients.py sums them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.errors import InfeasibleLayout, UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.parallelism.activation_checkpoint import checkpoints_of
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.sharding.role import Role, Table
from meshwright.parallelism.sharding.table import table_of
from meshwright.parallelism.tensor.tensor_modules import (
    GathersInput,
    GathersInputSumsOutput,
    GathersOutput,
    LooksUpOwnRows,
    PartOfSum,
    ReadsParts,
    SharesHeads,
    SumsOutput,
    change_class,
)

_CUT_DIMS: Mapping[Role, Mapping[str, int]] = {
    "column": {"weight": 0, "bias": 0},
    "kv": {"weight": 0, "bias": 0},
    "head": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "row_part": {"weight": 1},
    "vocabulary": {"weight": 0},
}
"""Which dim of which parameters is cut; others are whole on each rank."""
_BEHAVIOURS: Mapping[Role, type[ReadsParts]] = {
    "gather": GathersInput,
    "gather_output": GathersOutput,
    "gather_sum": GathersInputSumsOutput,
    "head": GathersInput,
    "row": SumsOutput,
    "row_part": PartOfSum,
    "vocabulary": LooksUpOwnRows,
}


def apply_tensor_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Change `model` in place so that it computes on this rank's parts over "tp", as its table says; a collective.

    `model` may be a stage of a pipeline, and lie on the meta device. Without tp nothing changes.
    """
    if meshes.degree("tp") == 1:
        return
    table = table_of(model, meshes.layout)
    cut = _Cut(meshes.axis("tp"))
    for name, module, role in _roles(model, table):
        cut(name, module, role, getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None))
    blocks = blocks_of(model)
    for index, checkpoint in checkpoints_of(blocks, meshes.layout):
        for part in blocks[index].modules():
            if isinstance(part, GathersInput):
                part.gathers_again = checkpoint == "none"


def _roles(model: nn.Module, table: Table) -> list[tuple[str, nn.Module, Role | None]]:
    """Return (name, module, role) of each module but those that are placed elsewhere; without a role it is whole."""
    roles: list[tuple[str, nn.Module, Role | None]] = []
    elsewhere: set[nn.Module] = set()
    for name, module in model.named_modules():
        role = next((role for pattern, role in table.items() if fnmatchcase(name, pattern)), None)
        if role == "elsewhere":
            elsewhere.update(module.modules())
        if module not in elsewhere:
            roles.append((name, module, role))
    return roles


class _Cut:
    """Callable: cuts one module after the other over `mesh`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placed: dict[nn.Parameter, nn.Parameter] = {}
        self._head_groups: dict[int, dist.ProcessGroup] = {}

    def __call__(self, name: str, module: nn.Module, role: Role | None, head_dim: int | None) -> None:
        """Change `module` to what `role` says; `head_dim` is that of the module around it."""
        behaviour = _BEHAVIOURS.get(role, ReadsParts) if role is not None else ReadsParts
        cut_dims = _CUT_DIMS.get(role, {}) if role is not None else {}
        if cut_dims:
            _require_kind(name, module, role)
        if role == "kv" and (num_sharing := _ranks_per_head(name, module, head_dim, self._mesh.size())) > 1:
            behaviour = SharesHeads
            module.head_group = self._head_group(num_sharing)  # type: ignore[assignment]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in self._placed:
                self._placed[parameter] = self._place(f"{name}.{key}", parameter, cut_dims.get(key))
            module.register_parameter(key, self._placed[parameter])
        if behaviour is not ReadsParts or module._parameters:
            change_class(module, behaviour, self._mesh.get_group())

    def _place(self, fqn: str, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Return `parameter` as a DTensor, cut along `dim` or whole; each rank cuts for itself, so nothing is sent."""
        part = parameter.detach()
        if dim is not None:
            _require_even(fqn, dim, parameter.shape[dim], self._mesh.size())
            part = part.chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()].contiguous()
        placement = Replicate() if dim is None else Shard(dim)
        shape, stride = parameter.shape, parameter.stride()
        placed = DTensor.from_local(part, self._mesh, [placement], run_check=False, shape=shape, stride=stride)
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    def _head_group(self, num_ranks: int) -> dist.ProcessGroup:
        """Return this rank's group, of groups of `num_ranks` consecutive ranks of the mesh."""
        if num_ranks not in self._head_groups:
            ranks = dist.get_process_group_ranks(self._mesh.get_group())
            first = self._mesh.get_local_rank() // num_ranks * num_ranks
            group = dist.new_group(ranks[first : first + num_ranks], use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._head_groups[num_ranks] = group
        return self._head_groups[num_ranks]


def _ranks_per_head(name: str, module: nn.Module, head_dim: int | None, tp: int) -> int:
    """Return how many ranks share one key/value head; 1 where each rank has whole heads of its own."""
    if head_dim is None:
        raise UnsupportedError(
            f"{name} has the role kv, for which the module around it must have head_dim, the width of one head: "
            "add that attribute, or make the role column"
        )
    weight = module.weight
    assert isinstance(weight, Tensor)
    num_heads = weight.shape[0] // head_dim
    if num_heads % tp and tp % num_heads:
        valid = [n for n in range(1, 2 * max(tp, num_heads)) if num_heads % n == 0 or n % num_heads == 0]
        raise InfeasibleLayout(
            f"layout.tp = {tp} does not share out the {num_heads} key/value heads of {name}: a rank needs whole heads, "
            f"or a head whole ranks; set layout.tp to {_nearest(valid, tp)}"
        )
    return max(1, tp // num_heads)


def _require_even(fqn: str, dim: int, size: int, tp: int) -> None:
    if size % tp:
        valid = [n for n in range(1, size + 1) if size % n == 0]
        raise InfeasibleLayout(
            f"layout.tp = {tp} does not divide {fqn}, whose dim {dim} is {size}: "
            f"set layout.tp to {_nearest(valid, tp)}, or change that size of the model"
        )


def _require_kind(name: str, module: nn.Module, role: Role | None) -> None:
    kind = nn.Embedding if role == "vocabulary" else nn.Linear
    if not isinstance(module, kind):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}, but only an nn.{kind.__name__} can have the role {role}: "
            "take it out of tensor_parallel, which leaves it whole on every rank"
        )
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
        raise UnsupportedError(
            f"{name} has padding_idx or max_norm, which an embedding cut along its rows does not follow: "
            "build it without, or set layout.tp to 1"
        )


def _nearest(valid: list[int], value: int) -> str:
    nearest = sorted(valid, key=lambda n: abs(n - value))[:2]
    return " or ".join(str(n) for n in sorted(nearest))
