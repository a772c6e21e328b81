"""Shards of a training state on this rank, and which rank saves which.

Ranks hold different names (pipeline stages), on different meshes (experts and the rest), and replicas of the same box.
No rank could list all of it at 1,024 ranks, so each tensor has a judge, the rank that its name hashes to: it receives
the claims of all ranks that hold a part of this tensor, checks that they cover it exactly once, and splits each box
among its replicas, which so write in parallel.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from torch import Tensor

from meshwright.checkpoint.format.boxes import Box, coverage_problem
from meshwright.checkpoint.format.dtypes import dtype_name
from meshwright.checkpoint.peers import GroupPeers
from meshwright.errors import CheckpointError
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.units import first_of

_MIN_SPLIT_BYTES = 1 << 20
"""A box is split among its replicas down to this size."""


class Shard(NamedTuple):
    """A box of one tensor that this rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Elements of the whole tensor, by dim."""
    box: Box
    data: Tensor
    """The box's elements."""


class Claim(NamedTuple):
    """One rank's report of a shard to the tensor's judge."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    num_bytes: int


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, list[Tensor]]:
    """Return all copies of each tensor of nested dicts by path, such as optimizer/norm.weight/step.

    A list in `state` holds copies of one tensor on this rank, such as a tied embedding in two pipeline stages.
    """
    flat: dict[str, list[Tensor]] = {}
    for key, value in state.items():
        assert "/" not in key, f"a key of a training state contains a slash: {key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            copies = value if isinstance(value, list) else [value]
            for tensor in copies:
                assert isinstance(tensor, Tensor), f"{prefix}{key} is a {type(tensor).__name__}, not a tensor"
            flat[f"{prefix}{key}"] = [tensor.detach() for tensor in copies]
    return flat


def local_shards(flat: Mapping[str, list[Tensor]]) -> list[Shard]:
    """Return this rank's shard of every tensor, empty ones included, from the first copy of each."""
    return [shard_of(name, copies[0]) for name, copies in flat.items()]


def shard_of(name: str, tensor: Tensor) -> Shard:
    """Return this rank's shard of `tensor`; its data shares the tensor's memory."""
    data, offsets = local_box(tensor)
    return Shard(name, dtype_name(tensor.dtype), tuple(tensor.shape), Box(tuple(offsets), tuple(data.shape)), data)


def judge_of(name: str, num_ranks: int) -> int:
    """Return the rank that judges the tensor `name`."""
    return xxhash.xxh3_64_intdigest(name.encode()) % num_ranks


def owned_shards(shards: Sequence[Shard], peers: GroupPeers) -> list[Shard]:
    """Return the parts of `shards` that this rank saves, so that each element is saved once; a collective.

    Raises CheckpointError on all ranks where they hold different shapes of one tensor or do not cover it.
    """
    by_judge: list[list[Shard]] = [[] for _ in range(peers.num_ranks)]
    for shard in shards:
        by_judge[judge_of(shard.name, peers.num_ranks)].append(shard)
    claims = peers.exchange([[_claim(shard) for shard in of_judge] for of_judge in by_judge])
    verdicts, problems = judge_claims([[_parsed_claim(*claim) for claim in of_rank] for of_rank in claims])
    problem = CheckpointError(f"saving failed: {first_of(problems)}") if problems else None
    peers.raise_on_all(problem)
    owned = []
    for of_judge, rows in zip(by_judge, peers.exchange(verdicts), strict=True):
        owned += [part for shard, own in zip(of_judge, rows, strict=True) if (part := _rows(shard, own)) is not None]
    return owned


def judge_claims(claims: Sequence[Sequence[Claim]]) -> tuple[list[list[tuple[int, int] | None]], list[str]]:
    """Return, by rank and claim, the rows (start, end in dim 0) to save, None for nothing; and the problems.

    `claims[rank]` are the shards that `rank` holds of the tensors of one judge. A box that several ranks hold is split
    among them if it is large, else one of them saves it.
    """
    verdicts: list[list[tuple[int, int] | None]] = [[None] * len(of_rank) for of_rank in claims]
    by_name: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for rank, of_rank in enumerate(claims):
        for position, claim in enumerate(of_rank):
            kinds[claim.name].add((claim.dtype, claim.shape))
            by_name[claim.name][claim.box].append((rank, position))
    problems = []
    for name, holders in by_name.items():
        if len(kinds[name]) > 1:
            what = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds[name]))
            problems.append(f"ranks hold different tensors under the name {name}: {what}")
            continue
        ((_, shape),) = kinds[name]
        if (uncovered := coverage_problem([box for box in holders if box.numel], shape)) is not None:
            problems.append(f"the ranks do not hold {name}: {uncovered}")
        for places in holders.values():
            rank, position = places[0]
            for (to, at), rows in zip(places, _split(claims[rank][position], places), strict=True):
                verdicts[to][at] = rows
    return verdicts, problems


def _split(claim: Claim, places: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
    """Return the rows that each holder of a box saves."""
    num_rows = claim.box.shape[0] if claim.box.shape else 1
    num_parts = max(1, min(len(places), num_rows, claim.num_bytes // _MIN_SPLIT_BYTES))
    # The first part goes to a different replica for each tensor, so that small ones spread over all.
    first = xxhash.xxh3_64_intdigest(f"{claim.name} {claim.box.offsets}".encode()) % len(places)
    rows: list[tuple[int, int] | None] = [None] * len(places)
    for part in range(num_parts):
        rows[(first + part) % len(places)] = (part * num_rows // num_parts, (part + 1) * num_rows // num_parts)
    return rows


def _rows(shard: Shard, rows: tuple[int, int] | None) -> Shard | None:
    """Return the part of `shard` with these rows of dim 0; None for no part."""
    if rows is None:
        return None
    start, end = rows
    if not shard.box.shape or (start, end) == (0, shard.box.shape[0]):
        return shard
    offsets, shape = shard.box
    box = Box((offsets[0] + start, *offsets[1:]), (end - start, *shape[1:]))
    return shard._replace(box=box, data=shard.data[start:end])


def _claim(shard: Shard) -> Claim:
    return Claim(shard.name, shard.dtype, shard.shape, shard.box, shard.data.numel() * shard.data.element_size())


def _parsed_claim(name: str, dtype: str, shape: list[int], box: list[list[int]], num_bytes: int) -> Claim:
    return Claim(name, dtype, tuple(shape), Box(tuple(box[0]), tuple(box[1])), num_bytes)
