"""Fields of a collective that all ranks have to pass alike, and the bytes that each rank exchanges with each other.

torch's fake process group checks neither; a real backend raises an error or deadlocks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Exchange(NamedTuple):
    """Bytes to and from each rank of the group; both empty if all pairs exchange the same number."""

    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def agreed_of(given: Mapping[str, Any], reduce_op: str) -> str:
    """Return a collective's reduction and root as text; "" without either.

    `given` are the operator's arguments by name, `reduce_op` the reduction of a c10d collective, whose own is opaque.
    """
    parts = []
    if "reduce_op" in given:
        parts.append(given["reduce_op"].lower() if isinstance(given["reduce_op"], str) else reduce_op or "sum")
    root = given.get("root_rank", given.get("src"))
    if root is not None:
        parts.append(f"root {root} of the group")
    return ", ".join(parts)


def exchange_of(name: str, given: Mapping[str, Any], num_ranks: int, place: int) -> Exchange:
    """Return the bytes that group rank `place` exchanges in the collective `name`.

    Raises ValueError for tensors and splits that do not fit together.
    """
    _require_whole(name, given, num_ranks)
    if "input_split_sizes" in given:
        found = _by_splits(given, num_ranks)
    elif name == "alltoall_":
        found = Exchange(_sizes(given["input_tensors"]), _sizes(given["output_tensors"]))
    elif name == "allgather_":
        (own,) = given["input_tensors"]
        found = Exchange((own.nbytes,) * num_ranks, _sizes(given["output_tensors"][0]))
    elif name == "gather_":
        (own,) = given["input_tensors"]
        at_root = _sizes(given["output_tensors"][0]) if given["root_rank"] == place else (0,) * num_ranks
        found = Exchange(_only(given["root_rank"], own.nbytes, num_ranks), at_root)
    elif name == "scatter_":
        (own,) = given["output_tensors"]
        at_root = _sizes(given["input_tensors"][0]) if given["root_rank"] == place else (0,) * num_ranks
        found = Exchange(at_root, _only(given["root_rank"], own.nbytes, num_ranks))
    else:
        return Exchange()
    return Exchange() if len({*found.sends, *found.receives}) == 1 else found


def _by_splits(given: Mapping[str, Any], num_ranks: int) -> Exchange:
    """Return the exchange of an all-to-all along dim 0; the functional one allocates its output."""
    source, output = given["input"], given.get("output")
    sends = _split(source, given["input_split_sizes"], num_ranks, "input")
    if output is not None:
        return Exchange(sends, _split(output, given["output_split_sizes"], num_ranks, "output"))
    row_bytes = _row_bytes(source)
    return Exchange(sends, tuple(rows * row_bytes for rows in given["output_split_sizes"]) or sends)


def _split(tensor: Tensor, splits: Sequence[int], num_ranks: int, what: str) -> tuple[int, ...]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % num_ranks:
            raise ValueError(f"all-to-all: {what} of {rows} rows must be a multiple of the group's {num_ranks} ranks")
        splits = [rows // num_ranks] * num_ranks
    if len(splits) != num_ranks or sum(splits) != rows:
        raise ValueError(
            f"all-to-all: {what}_split_sizes = {list(splits)} must be {num_ranks} numbers, one a rank, "
            f"whose sum is the {rows} rows of the {what}"
        )
    return tuple(number * _row_bytes(tensor) for number in splits)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.nbytes for tensor in tensors)


def _only(root: int, num_bytes: int, num_ranks: int) -> tuple[int, ...]:
    return tuple(num_bytes if rank == root else 0 for rank in range(num_ranks))


def _require_whole(name: str, given: Mapping[str, Any], num_ranks: int) -> None:
    """Raise ValueError unless the unsharded tensor has as many elements as all shards."""
    if name == "_allgather_base_":
        whole, shard = given["output_tensor"], given["input_tensor"]
    elif name == "_reduce_scatter_base_":
        whole, shard = given["input_tensor"], given["output_tensor"]
    else:
        return
    if whole.numel() != num_ranks * shard.numel():
        what = "all-gather" if name.startswith("_all") else "reduce-scatter"
        raise ValueError(
            f"{what}: the unsharded tensor has {whole.numel()} elements and must have {num_ranks} x {shard.numel()}, "
            "the group's ranks times the elements of a shard"
        )
