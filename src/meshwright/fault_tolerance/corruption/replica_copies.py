"""Which ranks hold a copy of the tensors of this rank, from the placement of its parameters on the meshes.

A parameter is split along the axes on which its DTensor is sharded, and differs between pipeline stages. Ranks that
differ only in other axes hold the same bits of it, of its reduced gradient and of its optimizer state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.fault_tolerance.corruption.replica_vote import Content
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box

State: TypeAlias = Callable[[], Mapping[str, Mapping[str, Sequence[Tensor]]]]
"""Returns the optimizer's state tensors by parameter name and key."""


class Copy(NamedTuple):
    """One tensor of this rank that other ranks hold, too."""

    name: str
    """Such as `gradient of norm.weight`."""
    tensor: Tensor
    """This rank's part."""


class ReplicaCopies:
    """The tensors of this rank that others hold copies of, by the number of the set of these ranks."""

    def __init__(self, model: Stages, meshes: Meshes, state: State) -> None:
        self._model, self._state = model, state
        self._sets: dict[str, int] = {}
        """Number of the set, by parameter name."""
        self.ranks_of_set: dict[int, tuple[int, ...]] = {}
        for name, parameter in canonical_parameters(model):
            ranks = holders(parameter, meshes)
            if len(ranks) > 1:
                number = _number_of(ranks)
                self._sets[name], self.ranks_of_set[number] = number, ranks

    @torch.no_grad()
    def of(self, content: Content) -> dict[int, list[Copy]]:
        """Return this rank's tensors of a kind by set, in an order that is the same on all ranks of the set."""
        found: dict[int, list[Copy]] = {number: [] for number in sorted(self.ranks_of_set)}
        for name, tensor_name, tensor in self._tensors(content):
            if name in self._sets:
                found[self._sets[name]].append(Copy(tensor_name, local_box(tensor)[0]))
        return found

    @torch.no_grad()
    def own_gradients(self) -> list[Tensor]:
        """Return this rank's part of every gradient, also of those that no other rank holds."""
        return [local_box(tensor)[0] for _, _, tensor in self._tensors("gradients")]

    def _tensors(self, content: Content) -> list[tuple[str, str, Tensor]]:
        """Return the parameter's name, the tensor's name and the tensor of each."""
        named = canonical_parameters(self._model)
        if content == "parameters":
            return [(name, name, parameter.detach()) for name, parameter in named]
        if content == "gradients":
            return [(name, f"gradient of {name}", one.grad) for name, one in named if one.grad is not None]
        return [
            (name, f"{key} of {name}", tensor)
            for name, by_key in self._state().items()
            for key, tensors in by_key.items()
            for tensor in tensors
        ]


def holders(parameter: nn.Parameter, meshes: Meshes) -> tuple[int, ...]:
    """Return the global ranks, ascending, that hold the same part of `parameter` as this one, itself included."""
    mesh = meshes.dense
    replicating = {"dp_replicate"}
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or ()
        if {"expert_dp_shard", "ep", "etp"}.intersection(axes):
            mesh = meshes.experts
        placed = zip(axes, parameter.placements, strict=True)
        replicating |= {axis for axis, placement in placed if placement.is_replicate()}
    names = mesh.mesh_dim_names
    assert names is not None
    place = tuple(slice(None) if axis in replicating else meshes.rank(axis) for axis in names)
    return tuple(sorted(mesh.mesh[place].reshape(-1).tolist()))


def _number_of(ranks: tuple[int, ...]) -> int:
    """Return a number for a set of ranks that is the same on all of them, in 63 bits."""
    return xxhash.xxh3_64_intdigest(repr(ranks).encode()) >> 1
