"""Writing of one checkpoint: each rank its data and manifest, then rank 0 the index and the rename.

The same steps run in the training process and, for an asynchronous save, in writer processes; `Peers` is how they
communicate. Order on disk: data fsync, manifest fsync, index fsync, folder fsync, rename, fsync of the parent.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from meshwright import __version__
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.durable import commit, remove, remove_stale, temporary_sibling, write_durably
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import (
    Index,
    RankFile,
    RankManifest,
    StoredShard,
    StoredTensor,
    data_name,
    hash_bytes,
    index_text,
    manifest_name,
)
from meshwright.checkpoint.peers import Peers
from meshwright.checkpoint.shards import Shard
from meshwright.errors import CheckpointError

MAX_SHARD_BYTES = 32 << 20
"""Larger shards are stored in several parts, so that a reader of a few rows need not read and verify all."""

PUBLISHES, COLLECTS = (0, 2), (1,)
"""Which of the calls of `Peers` in write_checkpoint, counted from 0, are publish and which are collect."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Extent(NamedTuple):
    """A contiguous box of one tensor, as it will lie in the data file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Elements of the whole tensor, by dim."""
    box: Box
    num_bytes: int


@dataclass(frozen=True)
class SaveRequest:
    """What all ranks of a save agree on."""

    folder: Path
    """The checkpoint's final folder."""
    metadata: dict[str, Any]
    """Anything JSON holds; that of rank 0 is stored."""
    sections: list[str]
    """Top-level keys of the state."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of every tensor that this rank holds, by name, so that empty ones are known, too."""


def write_checkpoint(
    request: SaveRequest,
    extents: Iterable[tuple[Extent, memoryview]],
    peers: Peers,
    after_write: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Commit `extents` of all ranks as one checkpoint; a collective.

    `after_write` is called with the number of bytes after each extent. Raises CheckpointError on all ranks if any of
    them fails; then the folder does not exist, and older checkpoints are unchanged.
    """
    opened = attempt(lambda: open_save(request), request.folder) if peers.rank == 0 else {}
    opened = peers.publish(opened)
    if "error" in opened:
        raise CheckpointError(f"saving failed on rank 0: {opened['error']}")
    temporary = Path(opened["temporary"])
    try:
        own = attempt(lambda: write_rank(request, extents, peers.rank, temporary, after_write), request.folder)
        outcomes = peers.collect(own)
        ended = peers.publish(finish_save(request, temporary, outcomes) if peers.rank == 0 else None)
    except KeyboardInterrupt:
        if peers.rank == 0:
            remove(temporary)
        raise
    if ended["error"] is not None:
        raise CheckpointError(ended["error"])


def extents_of(shards: Iterable[Shard]) -> list[Extent]:
    """Return how `shards` lie in the data file, large ones in several parts of whole rows."""
    extents: list[Extent] = []
    for shard in shards:
        num_rows = shard.box.shape[0] if shard.box.shape else 1
        num_bytes = shard.data.numel() * shard.data.element_size()
        if num_bytes == 0:
            continue
        rows_at_once = max(1, MAX_SHARD_BYTES * num_rows // num_bytes)
        for start in range(0, num_rows, rows_at_once):
            rows = min(rows_at_once, num_rows - start)
            box = shard.box
            if box.shape:
                box = Box((box.offsets[0] + start, *box.offsets[1:]), (rows, *box.shape[1:]))
            extents.append(Extent(shard.name, shard.dtype, shard.shape, box, num_bytes * rows // num_rows))
    return extents


def with_bytes(shards: Iterable[Shard]) -> Iterator[tuple[Extent, memoryview]]:
    """Yield each extent of `shards` with its bytes; tensors on a device or not contiguous are copied one by one."""
    for shard in shards:
        data = bytes_of(shard.data)
        start = 0
        for extent in extents_of([shard]):
            yield extent, data[start : start + extent.num_bytes]
            start += extent.num_bytes


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, row by row; they share its memory where it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def explain(error: OSError, folder: Path) -> str:
    """Return what failed in writing `folder`, and the fix."""
    what = f"{folder.name} could not be written to {folder.parent} ({error.strerror})"
    kept = "earlier checkpoints are untouched"
    if error.errno in _FULL:
        return f"{what}; {kept}: free space there, such as with `meshwright checkpoint gc`"
    if isinstance(error, FileNotFoundError):
        return f"{what}; {kept}: every rank must see the same folder: put run.dir on a file system that all hosts share"
    return f"{what}; {kept}: check that folder's disk and permissions, then resume"


def attempt(act: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return what `act` returns, or the error that the other ranks must know of."""
    try:
        return act()
    except CheckpointError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": explain(error, folder)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def open_save(request: SaveRequest) -> dict[str, Any]:
    """Make the temporary folder of a save and return {"temporary": its path}; raises CheckpointError, OSError."""
    json.dumps(request.metadata)
    if request.folder.exists():
        raise CheckpointError(
            f"{request.folder} exists, and checkpoints are never overwritten: "
            "resume from it, or move it away before saving this step again"
        )
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(request.folder.parent)
    temporary = temporary_sibling(request.folder)
    temporary.mkdir()
    return {"temporary": str(temporary)}


def write_rank(
    request: SaveRequest,
    extents: Iterable[tuple[Extent, memoryview]],
    rank: int,
    temporary: Path,
    after_write: Callable[[int], None],
) -> dict[str, Any]:
    """Write this rank's data and manifest durably; return its entry of the index."""
    tensors = {name: StoredTensor(dtype=dtype, shape=shape, shards=[]) for name, (dtype, shape) in _names(request)}
    num_bytes = 0
    with (temporary / data_name(rank)).open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
        for extent, data in extents:
            # Both release the interpreter's lock, so the hash costs little while the disk is the limit.
            digest = hashing.submit(hash_bytes, data)
            _write(file, data)
            tensors[extent.name].shards.append(_stored(extent, num_bytes, digest.result()))
            num_bytes += extent.num_bytes
            after_write(extent.num_bytes)
        os.fsync(file.fileno())
    used = {name: tensor for name, tensor in tensors.items() if tensor.shards or 0 in tensor.shape}
    manifest = RankManifest(save_id=_save_id(temporary), rank=rank, num_bytes=num_bytes, tensors=used)
    text = manifest.model_dump_json()
    write_durably(temporary / manifest_name(rank), text)
    return RankFile(num_bytes=num_bytes, manifest_xxh3_128=hash_bytes(text.encode())).to_dict()


def _names(request: SaveRequest) -> Iterable[tuple[str, tuple[str, tuple[int, ...]]]]:
    return sorted(request.tensors.items())


def _write(file: BinaryIO, data: memoryview) -> None:
    num_written = 0
    while num_written < len(data):
        num_written += file.write(data[num_written:])


def _stored(extent: Extent, start: int, digest: str) -> StoredShard:
    return StoredShard(
        offsets=extent.box.offsets,
        shape=extent.box.shape,
        start=start,
        num_bytes=extent.num_bytes,
        xxh3_128=digest,
    )


def finish_save(request: SaveRequest, temporary: Path, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the index and commit, or discard if a rank failed; return {"error": None or the text for all}."""
    failures = {rank: outcome["error"] for rank, outcome in enumerate(outcomes) if "error" in outcome}
    if not failures:
        text = index_of(request, _save_id(temporary), outcomes)
        committed = attempt(lambda: _commit(temporary, request.folder, text), request.folder)
        if "error" not in committed:
            return {"error": None}
        failures = {0: committed["error"]}
    remove(temporary)
    return {"error": summary(failures)}


def index_of(request: SaveRequest, save_id: str, outcomes: list[dict[str, Any]]) -> str:
    """Return the text of the index, from what `write_rank` returned on each rank."""
    index = Index(
        save_id=save_id,
        metadata=request.metadata,
        versions={"meshwright": __version__, "torch": torch.__version__},
        sections=request.sections,
        ranks=[RankFile.from_dict(outcome) for outcome in outcomes],
    )
    return index_text(index)


def _commit(temporary: Path, folder: Path, index: str) -> dict[str, Any]:
    write_durably(temporary / FILE_NAME, index)
    commit(temporary, folder)
    return {}


def _save_id(temporary: Path) -> str:
    return temporary.name.rpartition("-")[2]


def summary(failures: Mapping[int, str]) -> str:
    """Return one line for each distinct reason, with its ranks."""
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(failures.items()):
        ranks_by_reason.setdefault(reason, []).append(rank)
    lines = []
    for reason, ranks in ranks_by_reason.items():
        where = f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        lines.append(f"saving failed on {where}: {reason}")
    return "\n".join(lines)
