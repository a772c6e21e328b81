"""collective_of(): whether an operator is a collective or a message, with its group, bytes and root."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves

from meshwright.parallelism.torch_private.torch_dispatch import tensors_in
from meshwright.spec.trace.trace import BATCHED, NONE, RecordKind
from meshwright.tracer.record.collective_bytes import agreed_of, exchange_of
from meshwright.tracer.record.op_call import OpCall
from meshwright.tracer.torch_distributed.torch_process_group import serves_host

COMMUNICATOR = "(communicator {})"
"""Suffix of the axis of the second and later groups of the same ranks: each is ordered on its own."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVES = ("check_for_nan", "wait_tensor", "_wrap_tensor_autograd")
_MESH_PREFIX, _NAMELESS = "mesh_", "dim_"
_SHARDING, _MESSAGES = ("fsdp", "expert_dp_shard"), ("pp", "cp")
_FUNCTIONAL = ("ep", "tp", "cp", *_SHARDING)
_AXES_OF_OPERATOR = {
    "_allgather_base_": _SHARDING,
    "_reduce_scatter_base_": _SHARDING,
    "send": _MESSAGES,
    "recv_": _MESSAGES,
}
"""Axes along which the runtime calls an operator; functional collectives use _FUNCTIONAL, other operators none."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective or a message."""

    kind: RecordKind
    group: tuple[tuple[int, ...], str] | None
    """Global ranks of its group, in order, and its mesh axis; None for an operator without a group."""
    communicator: str = ""
    """Distinguishes the group from earlier ones of the same ranks; "" for the first."""
    peer: int = NONE
    """Global rank at the other end of a message."""
    is_functional: bool = False
    """Whether an operator on its result waits for it, not a Work object."""
    num_bytes: int = 0
    """Of the unsharded tensor: the gathered one, or the input of a reduction."""
    agreed: str = ""
    """As in Signature, as are the next two."""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    written: tuple[Tensor, ...] = ()
    """Arguments that it writes to, which the operators' schemas do not mark."""
    is_in_place: bool = False
    """Whether these are also its inputs."""
    root: int | None = None
    """Group rank of the root."""
    is_barrier: bool = False
    serves_host: bool = True
    """Whether its group has a backend for CPU tensors."""

    @property
    def num_ranks(self) -> int:
        """Return the size of its group; 1 without a group."""
        return 1 if self.group is None else len(self.group[0])


def collective_of(call: OpCall, reduce_op: str = "", *, is_batched: bool = False) -> CollectiveCall | None:
    """Return the collective or message of an operator call; None for other operators.

    `reduce_op` is the reduction of a c10d collective, `is_batched` whether a message is part of a batch. Raises
    ValueError for tensors that do not fit together, as a real backend does.
    """
    func = call.func
    if func.namespace not in _NAMESPACES or func._opname in _NO_COLLECTIVES:
        return None
    given, process_group = call.given, group_of((call.args, call.kwargs))
    ranks = None if process_group is None else tuple(dist.get_process_group_ranks(process_group))
    group = None if process_group is None or ranks is None else (ranks, _axis(process_group, func))
    communicator = "" if process_group is None else _communicator(process_group)
    on_host = process_group is None or serves_host(process_group)
    num_bytes = max((_num_bytes(one) for one in (*given.values(), call.result)), default=0)
    if func._opname in ("send", "recv_"):
        kind = RecordKind.SEND if func._opname == "send" else RecordKind.RECEIVE
        place = given["dst" if "dst" in given else "src"]
        peer = NONE if ranks is None else _require_member(ranks, place, func)[place]
        written = () if kind == RecordKind.SEND else tuple(tensors_in(given["tensors"]))
        marks = (f"tag {given['tag']}" if given.get("tag") else "", BATCHED if is_batched else "")
        return CollectiveCall(
            kind,
            group,
            communicator,
            peer,
            num_bytes=num_bytes,
            agreed=", ".join(filter(None, marks)),
            written=written,
            serves_host=on_host,
        )
    if ranks is not None and "root_rank" in given:
        _require_member(ranks, given["root_rank"], func)
    place = dist.get_rank(process_group)
    exchange = exchange_of(func._opname, given, 1 if ranks is None else len(ranks), place)
    return CollectiveCall(
        RecordKind.COLLECTIVE,
        group,
        communicator,
        is_functional=func.namespace != _NAMESPACES[0],
        num_bytes=num_bytes,
        agreed=agreed_of(given, reduce_op),
        sends=exchange.sends,
        receives=exchange.receives,
        written=_written(given, place) if func.namespace == _NAMESPACES[0] else (),
        is_in_place=func.namespace == _NAMESPACES[0] and "tensors" in given,
        root=given.get("root_rank", given.get("src")),
        is_barrier="barrier" in func._opname,
        serves_host=on_host,
    )


def wire_name(func: Any) -> str:
    """Return the name by which ranks compare an operator: in-place functional collectives equal the others."""
    name = func._opname.removesuffix("_") if func.namespace == _NAMESPACES[1] else func._opname
    return f"{func.namespace}.{name}.{func._overloadname}"


def _require_member(ranks: tuple[int, ...], place: int, func: Any) -> tuple[int, ...]:
    if not 0 <= place < len(ranks):
        raise ValueError(
            f"{func._opname}: rank {place} of a group of ranks 0 to {len(ranks) - 1}: "
            "use a rank of the group, such as (rank + 1) % world_size"
        )
    return ranks


def _num_bytes(argument: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(argument))


def _written(given: Mapping[str, Any], place: int) -> tuple[Tensor, ...]:
    """Return the tensors that a c10d collective writes to: its outputs, or its in-place arguments."""
    outputs = [value for name, value in given.items() if name.startswith("output")]
    # A broadcast only reads on its root, a reduce writes only there.
    is_root = given.get("root_rank", place) == place
    in_place = "root_rank" not in given or is_root == ("reduce_op" in given)
    return tuple(tensors_in([*outputs, *(given.get("tensors", ()) if in_place else ())]))


def group_of(args: Any) -> ProcessGroup | None:
    """Return the process group among an operator's arguments: a name, or a boxed group."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, ProcessGroup):
            return leaf
        if isinstance(leaf, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(leaf)
            except RuntimeError:
                continue
        if isinstance(leaf, str) and (group := _by_name(leaf)) is not None:
            return group
    return None


def _axis(group: ProcessGroup, func: Any) -> str:
    """Return the mesh axis of a group, from the description that DeviceMesh gives it.

    For an axis of all ranks DeviceMesh uses the default group. Its axis is then the first one of the operator that no
    other group has, if the runtime's own meshes exist.
    """
    if group.group_desc.startswith(_MESH_PREFIX):
        name = group.group_desc.removeprefix(_MESH_PREFIX)
        # For reshard_after_forward = n FSDP2 splits its mesh into axes without names.
        return _SHARDING[0] if name.startswith(_NAMELESS) and func._opname in _AXES_OF_OPERATOR else name
    named = {one.group_desc.removeprefix(_MESH_PREFIX) for one in dist.distributed_c10d._world.pg_map}
    if not named & {"pp", "dp_replicate"}:
        return ""
    axes = _AXES_OF_OPERATOR.get(func._opname, _FUNCTIONAL if func.namespace != "c10d" else ())
    return next((axis for axis in axes if axis not in named), "")


def _communicator(group: ProcessGroup) -> str:
    """Return the number of a group among those of the same ranks, as text; "" for the first.

    All ranks make them in the same order. Groups of a mesh are counted by axis, since its name distinguishes them.
    """
    ranks, axis = dist.distributed_c10d._world.pg_group_ranks, _named_axis(group)
    earlier = itertools.takewhile(lambda one: one is not group, dist.distributed_c10d._world.pg_map)
    number = 1 + sum(
        one.size() == group.size() and _named_axis(one) == axis and list(ranks[one]) == list(ranks[group])
        for one in earlier
    )
    return "" if number == 1 else COMMUNICATOR.format(number)


def _named_axis(group: ProcessGroup) -> str:
    return group.group_desc if group.group_desc.startswith(_MESH_PREFIX) else ""


def _by_name(name: str) -> ProcessGroup | None:
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None
