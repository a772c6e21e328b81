"""What all ranks of a training loop must mean alike before they save: one step, one folder, equal replicas.

A plain tensor, a plain value or a replica of a DTensor that differs between ranks would be saved from one of them, and
loaded by all. Tensors are compared by a hash of at most 4,096 of their elements, spread evenly: a replica that went its
own way in training differs in all of them, and hashing whole models would take as long as writing them.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.loop.loop_state import LoopState
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import bytes_of
from meshwright.checkpoint.shards import flatten, judge_of
from meshwright.errors import ConfigError
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.units import first_of

_NUM_COMPARED = 4096


def require_same_place(folder: str, step: int | str, peers: GroupPeers) -> None:
    """Raise ConfigError on all ranks that save or load different steps, or name different folders."""
    for what, values in zip(("step", "folder"), zip(*peers.gather((step, folder)), strict=True), strict=True):
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"ranks name different {what}s: {values[0]} on rank 0, {values[other]} on rank {other}: "
                f"give the same {what} on all ranks"
            )


def agreed_values(opened: LoopState, peers: GroupPeers) -> dict[str, Any]:
    """Return the plain values of all ranks by path; raises ConfigError on all ranks where they differ."""
    own = opened.values
    # As a rule they are the same, and then only a hash of them travels.
    if len(set(peers.gather(xxhash.xxh3_128_hexdigest(repr(own).encode())))) == 1:
        return own
    values: dict[str, Any] = {}
    problems = set()
    for of_rank in peers.gather(own):
        for path, value in of_rank.items():
            # As text, since NaN is not equal to itself.
            if path in values and repr(values[path]) != repr(value):
                problems.add(path)
            values.setdefault(path, value)
    _raise(problems)
    return values


def share_sections(opened: LoopState, peers: GroupPeers) -> None:
    """Let every rank have the keys of all, without tensors where it gave none; a collective."""
    for keys in peers.gather(sorted(opened.tensors)):
        for key in keys:
            opened.tensors.setdefault(key, {})


def require_equal_replicas(opened: LoopState, peers: GroupPeers) -> None:
    """Raise ConfigError on all ranks where replicas differ; buffers of modules become those of rank 0 in what is saved.

    Buffers such as running means differ between the ranks of DDP; torch's own loops save those of rank 0.
    """
    if peers.num_ranks == 1:
        return
    flat = {name: copies[0] for name, copies in flatten(opened.tensors).items()}
    different = _different({name: tensor for name, tensor in flat.items() if _is_replica(tensor)}, peers)
    own_buffers = peers.gather(sorted(different & opened.buffers))
    buffers = sorted({name for names in own_buffers for name in names})
    _raise(different - set(buffers))
    saved = peers.publish({name: flat[name].detach().cpu() for name in buffers if name in flat})
    _raise(set(buffers) - saved.keys())
    for name in buffers:
        if name in flat:
            _replace(opened.tensors, name.split("/"), saved[name])


def _raise(names: set[str]) -> None:
    if names:
        raise ConfigError(
            f"ranks hold different values of {first_of(sorted(names))}: where that is meant, as with a loader's or a "
            'generator\'s state, give each rank a key of its own, such as f"rng{rank}"; where not, ranks have diverged'
        )


def _is_replica(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or any(placement.is_replicate() for placement in tensor.placements)


def _different(tensors: Mapping[str, Tensor], peers: GroupPeers) -> set[str]:
    """Return the names whose boxes several ranks hold with different elements; the judge of a name compares them."""
    messages: list[list[Any]] = [[] for _ in range(peers.num_ranks)]
    for name, tensor in tensors.items():
        data, offsets = local_box(tensor)
        box = f"{name}@{list(offsets)}+{list(data.shape)}"
        messages[judge_of(name, peers.num_ranks)].append([name, box, _digest(data)])
    seen: dict[str, set[str]] = defaultdict(set)
    found = set()
    for of_rank in peers.exchange(messages):
        for name, box, digest in of_rank:
            seen[box].add(digest)
            if len(seen[box]) > 1:
                found.add(name)
    return {name for names in peers.gather(sorted(found)) for name in names}


def _digest(data: Tensor) -> str:
    flat = data.detach().reshape(-1)
    stride = max(1, flat.numel() // _NUM_COMPARED)
    sample = flat[::stride].contiguous().cpu() if flat.numel() else torch.empty(0, dtype=flat.dtype)
    return xxhash.xxh3_64_hexdigest(bytes_of(sample)) if sample.numel() else ""


def _replace(tensors: dict[str, Any], path: list[str], tensor: Tensor) -> None:
    *outer, last = path
    for key in outer:
        tensors = tensors[key]
    tensors[last] = tensor
