"""MatrixExchange: whole matrices from the shards of a group of ranks, each computed on by one of them.

FSDP2 and tensor parallelism leave each rank a part of every matrix. A function of whole matrices, such as an
orthogonalization, could run on every rank after an all-gather; each rank would then do all of the work. Here a matrix
has one owner: all ranks send it their parts, and it sends the result back, part by part. So each rank receives, and
computes on, about 1 / ranks of the matrices, and an all-to-all moves what a reduce-scatter of them would.

Owners are chosen greedily (spec/step/matrix_owners.py). In a round each rank owns one matrix at most, so that what is
gathered at once is two of them.

Stacked experts, of shape (experts, out, in), are a matrix each. Ranks that hold other experts, and replicas, have no
part in the exchange: each replica does all of the work.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.parallelism.collectives import all_to_all_rows
from meshwright.parallelism.torch_private.torch_compat import boxes_along, local_box
from meshwright.parallelism.torch_private.torch_nccl import new_group_like
from meshwright.spec.step.matrix_owners import orthogonalization_cost, owners_of

_MATRIX_DIMS = 2


class MatrixPart(NamedTuple):
    """The rows and columns of a matrix that a rank holds."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape[0] * self.shape[1]


class ShardedMatrix(NamedTuple):
    """One matrix of a parameter."""

    parameter: Tensor
    number: int
    """Position among the matrices that this rank has parts of, in the order of the leading dims."""
    parts: Sequence[MatrixPart]
    """By rank of the group."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of the whole matrix."""
        return self.parameter.shape[-2], self.parameter.shape[-1]

    def of(self, local: Tensor) -> Tensor:
        """Return this matrix's part of a tensor that is sharded as the parameter is, a view of its local shard."""
        *leading, num_rows, num_columns = local.shape
        return local.view(math.prod(leading), num_rows, num_columns)[self.number]


class MatrixExchange:
    """The matrices of parameters that one group of ranks shares, and their owners."""

    def __init__(self, matrices: Sequence[ShardedMatrix], group: dist.ProcessGroup | None) -> None:
        """`group` is None where each rank has whole matrices."""
        self._group = group
        num_ranks = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._rounds = [*zip_longest(*assign(matrices, num_ranks))]

    def apply(
        self,
        part_of: Callable[[ShardedMatrix], Tensor],
        compute: Callable[[Tensor], Tensor],
        take: Callable[[ShardedMatrix, Tensor], None],
    ) -> None:
        """Compute on all matrices; a collective of the group.

        `part_of` returns this rank's part of a matrix, `compute` the result for a whole one, of the same shape, and
        `take` gets this rank's part of the result. All parts have one dtype.
        """
        for owned in self._rounds:
            matrices = [matrix for matrix in owned if matrix is not None]
            if self._group is None:
                take(matrices[0], compute(part_of(matrices[0])))
                continue
            own = owned[self._rank]
            sent = [0 if matrix is None else matrix.parts[self._rank].numel for matrix in owned]
            received = [0] * len(owned) if own is None else [part.numel for part in own.parts]
            outgoing = torch.cat([part_of(matrix).flatten() for matrix in matrices])
            arrived = all_to_all_rows(outgoing, sent, received, self._group)
            if own is not None:
                arrived = _split(compute(_whole(arrived, own)), own)
            returned = iter(all_to_all_rows(arrived, received, sent, self._group).split(sent))
            for matrix, flat in zip(owned, returned, strict=True):
                if matrix is not None:
                    take(matrix, flat.view(matrix.parts[self._rank].shape))


def assign(matrices: Iterable[ShardedMatrix], num_ranks: int) -> list[list[ShardedMatrix]]:
    """Return the matrices that each rank owns, the costliest first; the same on every rank."""
    known = [*matrices]
    owned = owners_of([orthogonalization_cost(*matrix.shape) for matrix in known], num_ranks)
    return [[known[position] for position in positions] for positions in owned]


def exchanges_of(parameters: Iterable[Tensor]) -> list[MatrixExchange]:
    """Return the exchanges of parameters of two dims or more; a collective of the ranks that share their matrices."""
    by_ranks: dict[tuple[int, ...], list[ShardedMatrix]] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {(): None}
    for parameter in parameters:
        dims = _cutting_dims(parameter)
        ranks = _ranks_along(parameter, dims)
        if ranks not in groups:
            groups[ranks] = _group_of(parameter, dims, ranks)
        by_ranks.setdefault(ranks, []).extend(_matrices(parameter, dims))
    return [MatrixExchange(matrices, groups[ranks]) for ranks, matrices in by_ranks.items()]


def _cutting_dims(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh dims of several ranks that shard rows or columns."""
    if not isinstance(parameter, DTensor):
        return ()
    first = parameter.dim() - _MATRIX_DIMS
    return tuple(
        dim
        for dim, placement in enumerate(parameter.placements)
        if parameter.device_mesh.size(dim) > 1 and getattr(placement, "dim", -1) >= first
    )


def _ranks_along(parameter: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one along `dims` alone, in the mesh's order."""
    if not isinstance(parameter, DTensor) or not dims:
        return ()
    own = dist.get_rank()
    along = [dist.get_process_group_ranks(parameter.device_mesh.get_group(dim)) for dim in dims]
    # Meshes are regular: a step along one dim is the same everywhere.
    return tuple(own + sum(rank - own for rank in place) for place in product(*along))


def _group_of(parameter: Tensor, dims: Sequence[int], ranks: tuple[int, ...]) -> dist.ProcessGroup:
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    # As DeviceMesh describes its own, so that profiles and traces name the axes.
    name = f"mesh_{'_'.join((mesh.mesh_dim_names or ())[dim] for dim in dims)}"
    return new_group_like(mesh.get_group(dims[0]), [*ranks], name)


def _matrices(parameter: Tensor, dims: Sequence[int]) -> Iterator[ShardedMatrix]:
    """Yield the matrices of `parameter` that this rank has parts of."""
    parts = [_part(shape, offsets) for shape, offsets in boxes_along(parameter, dims)]
    for number in range(math.prod(local_box(parameter)[0].shape[:-_MATRIX_DIMS])):
        yield ShardedMatrix(parameter, number, parts)


def _part(shape: Sequence[int], offsets: Sequence[int]) -> MatrixPart:
    rows, columns = (
        slice(start, start + size) for size, start in zip(shape[-_MATRIX_DIMS:], offsets[-_MATRIX_DIMS:], strict=True)
    )
    return MatrixPart(rows, columns)


def _whole(flat: Tensor, matrix: ShardedMatrix) -> Tensor:
    """Return the matrix whose parts follow each other in `flat`, by rank."""
    whole = flat.new_empty(matrix.shape)
    for part, values in zip(matrix.parts, flat.split([part.numel for part in matrix.parts]), strict=True):
        whole[part.rows, part.columns] = values.view(part.shape)
    return whole


def _split(whole: Tensor, matrix: ShardedMatrix) -> Tensor:
    """Return the parts of a matrix, one after another by rank."""
    return torch.cat([whole[part.rows, part.columns].flatten() for part in matrix.parts])
