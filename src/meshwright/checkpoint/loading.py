"""Loading in place on any layout: complete and bit-equal, or refused.

Each rank reads some of the manifests; the ranks look up together which shards each of them needs (lookup.py). So no
rank reads all manifests, and each shard that a rank needs is read once and verified by its hash.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meshwright.checkpoint.format.boxes import intersection
from meshwright.checkpoint.format.dtypes import torch_dtype
from meshwright.checkpoint.format.manifest import (
    Index,
    RankManifest,
    data_name,
    hash_bytes,
    read_index,
    read_manifest,
    remedy,
    size_problem,
)
from meshwright.checkpoint.format.saved import Saved
from meshwright.checkpoint.lookup import look_up
from meshwright.checkpoint.peers import GroupPeers, ProcessGroup
from meshwright.checkpoint.shards import Shard, flatten, local_shards
from meshwright.errors import CheckpointError, DamagedCheckpoint


def load(folder: Path, state: Mapping[str, Any], group: ProcessGroup = None) -> dict[str, Any]:
    """Fill the tensors of `state` in place from `folder` and return its metadata; a collective.

    Under each top-level key of `state` all ranks together must hold exactly the saved names, shapes and dtypes; the
    sharding may differ. Raises CheckpointError on all ranks, possibly after some tensors were filled:
    DamagedCheckpoint where files differ from what was saved.
    """
    peers = GroupPeers(group)
    flat = flatten(state)
    shards = local_shards(flat)
    index, manifests, problem = _read_own(folder, state.keys(), peers)
    peers.raise_on_all(problem)
    assert index is not None
    answers = look_up(folder, manifests, shards, state.keys(), peers)
    problem = None
    try:
        fill(folder, shards, answers)
    except CheckpointError as error:
        problem = error
    peers.raise_on_all(problem)
    for first, *others in flat.values():
        for other in others:
            other.copy_(first)
    return index.metadata


def fill(
    folder: Path, shards: Sequence[Shard], saved: Sequence[Sequence[Saved]], verified: Collection[int] = ()
) -> None:
    """Copy into each of `shards` the parts that its `saved` shards hold, file by file, reading each once.

    The files of the ranks in `verified` were compared with their hashes just before, and are not again.
    """
    targets: dict[tuple[int, int], list[tuple[Shard, Saved]]] = defaultdict(list)
    for shard, parts in zip(shards, saved, strict=True):
        for part in parts:
            assert part.shard is not None
            targets[part.rank, part.shard.start].append((shard, part))
    open_rank, file = -1, None
    try:
        for (rank, _), users in sorted(targets.items(), key=lambda item: item[0]):
            if rank != open_rank:
                if file is not None:
                    file.close()
                open_rank, file = rank, open_data(folder, rank)
            assert file is not None
            _fill_from_one(file, folder, users, is_verified=rank in verified)
    finally:
        if file is not None:
            file.close()


def open_data(folder: Path, rank: int) -> BinaryIO:
    """Return the data file of `rank`; raises CheckpointError if it cannot be opened."""
    path = folder / data_name(rank)
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint(f"{path} is no file: {remedy(folder)}")
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: {remedy(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its disk and permissions") from error


def read_verified(file: BinaryIO, folder: Path, saved: Saved, into: memoryview, *, is_verified: bool = False) -> None:
    """Fill `into` with the bytes of a stored shard; raises DamagedCheckpoint if they are not those that were saved.

    Where the shard `is_verified` already, only their number is checked.
    """
    shard = saved.shard
    assert shard is not None
    path = folder / data_name(saved.rank)
    num_read = 0
    try:
        file.seek(shard.start)
        while num_read < len(into):
            count = file.readinto(into[num_read:])  # type: ignore[attr-defined]
            if not count:
                break
            num_read += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its disk and permissions") from error
    if num_read < shard.num_bytes or not (is_verified or hash_bytes(into) == shard.xxh3_128):
        raise DamagedCheckpoint(
            f"{path} is damaged: bytes {shard.start} to {shard.start + shard.num_bytes} "
            f"({saved.name} at {list(shard.offsets)}) do not match their hash: {remedy(folder)}"
        )


def _fill_from_one(file: BinaryIO, folder: Path, users: Sequence[tuple[Shard, Saved]], *, is_verified: bool) -> None:
    """Read one stored shard and copy it into its targets; a target that is just this shard is read in place."""
    target, saved = users[0]
    assert saved.shard is not None
    stored = saved.shard.box
    if len(users) == 1 and (common := intersection(stored, target.box)) == stored:
        whole = target.data[stored.within(target.box)]
        if whole.is_contiguous() and whole.device.type == "cpu":
            data = whole.detach().view(-1).view(torch.uint8).numpy().data
            read_verified(file, folder, saved, data, is_verified=is_verified)
            return
    buffer = torch.empty(saved.shard.num_bytes, dtype=torch.uint8)
    read_verified(file, folder, saved, buffer.numpy().data, is_verified=is_verified)
    elements = buffer.view(torch_dtype(saved.dtype)).view(stored.shape)
    for target, _ in users:
        common = intersection(stored, target.box)
        assert common is not None
        target.data[common.within(target.box)].copy_(elements[common.within(stored)])


def _read_own(
    folder: Path, sections: Collection[str], peers: GroupPeers
) -> tuple[Index | None, list[RankManifest], CheckpointError | None]:
    """Return the index, this rank's part of the manifests, and the first problem found in them."""
    try:
        index = read_index(folder)
        if absent := [section for section in sections if section not in index.sections]:
            raise CheckpointError(
                f"{folder} holds {', '.join(index.sections) or 'nothing'} but no {', '.join(absent)}, so it is no "
                "training state to resume: start a new run from its weights with model.initial_weights"
            )
        own = range(peers.rank, len(index.ranks), peers.num_ranks)
        if problems := [problem for rank in own if (problem := size_problem(folder, index, rank)) is not None]:
            raise DamagedCheckpoint("\n".join(problems))
        return index, [read_manifest(folder, index, rank) for rank in own], None
    except CheckpointError as error:
        return None, [], error
