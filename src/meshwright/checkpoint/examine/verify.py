"""verify_checkpoint: every byte of a checkpoint read and compared with its hash; needs no torch.

All damage is reported, not the first: each data file is read from its start to its end by one of several threads, which
hash outside of the interpreter's lock.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import xxhash
from pydantic import ValidationError

from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import (
    Index,
    RankManifest,
    data_name,
    manifest_name,
    read_index,
    read_manifest,
    step_of,
)
from meshwright.checkpoint.format.saved import Saved, saved_in, uncovered
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.spec.run.checkpoint_findings import CheckpointVerification, Damage

_BLOCK_BYTES = 8 << 20
"""Bytes that one thread holds in memory."""
_MAX_THREADS = 8


def verify_checkpoint(
    folder: Path, report_bytes: Callable[[int], None] = lambda num_bytes: None, num_threads: int | None = None
) -> CheckpointVerification:
    """Return all damage of the checkpoint in `folder`; raises CheckpointError for files that cannot be read at all.

    `report_bytes` is called by several threads with the bytes that were read since its last call.
    """
    started_s = time.perf_counter()
    try:
        index = read_index(folder)
    except DamagedCheckpoint as error:
        damage = Damage(what=str(error), file=FILE_NAME)
        return _verification(folder, None, [], [damage], started_s)
    damages: list[Damage] = []
    manifests: list[RankManifest] = []
    for rank in range(len(index.ranks)):
        manifest, found = _checked_manifest(folder, index, rank)
        damages += found
        manifests += [manifest] if manifest is not None else []
    # Format 1 has no file of a rank that saved nothing.
    with_file = [manifest for manifest in manifests if index.manifests is None or manifest.num_bytes]
    threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        for of_rank in pool.map(lambda manifest: [*_data_damages(folder, manifest, report_bytes)], with_file):
            damages += of_rank
    if len(manifests) == len(index.ranks):
        # What an unreadable manifest lists would be missing here a second time.
        saved = [each for manifest in manifests for each in saved_in(manifest, index.sections)]
        damages += [Damage(what=line, file=FILE_NAME, tensor=line.partition(":")[0]) for line in uncovered(saved)]
    return _verification(folder, index, manifests, damages, started_s)


def _verification(
    folder: Path, index: Index | None, manifests: Sequence[RankManifest], damages: list[Damage], started_s: float
) -> CheckpointVerification:
    return CheckpointVerification(
        folder=str(folder),
        step=step_of(folder),
        num_bytes=sum(manifest.num_bytes for manifest in manifests),
        num_tensors=len({name for manifest in manifests for name in manifest.tensors}),
        num_shards=sum(len(tensor.shards) for manifest in manifests for tensor in manifest.tensors.values()),
        num_ranks=0 if index is None else len(index.ranks),
        duration_s=time.perf_counter() - started_s,
        damages=damages,
    )


def _checked_manifest(folder: Path, index: Index, rank: int) -> tuple[RankManifest | None, list[Damage]]:
    """Return a rank's manifest, None if its bytes are not those that were saved, and what is wrong with it."""
    name = FILE_NAME if index.manifests is not None else manifest_name(rank)
    try:
        manifest = read_manifest(folder, index, rank)
    except DamagedCheckpoint as error:
        return None, [Damage(what=_without_path(error, folder), file=name, rank=rank)]
    except ValidationError as error:
        return None, [Damage(what=f"is no manifest: {error}", file=name, rank=rank)]
    damages = []
    if manifest.save_id != index.save_id:
        damages.append(Damage(what=f"is of save {manifest.save_id}, not {index.save_id}", file=name, rank=rank))
    if (manifest.rank, manifest.num_bytes) != (rank, index.ranks[rank].num_bytes):
        what = f"is of rank {manifest.rank} and {manifest.num_bytes} bytes, the index says otherwise"
        damages.append(Damage(what=what, file=name, rank=rank))
    return manifest, damages


def _data_damages(folder: Path, manifest: RankManifest, report_bytes: Callable[[int], None]) -> Iterator[Damage]:
    """Yield the damage in the data file of one rank, reading it once from start to end."""
    rank, name = manifest.rank, data_name(manifest.rank)
    if (folder / name).exists() and not (folder / name).is_file():
        # Opening a pipe would wait indefinitely.
        yield Damage(what="is no file", file=name, rank=rank)
        return
    try:
        with (folder / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.num_bytes:
                yield Damage(what=f"has {size} bytes, {manifest.num_bytes} were saved", file=name, rank=rank)
            shards = [(each.shard.start, each) for each in saved_in(manifest, _sections(manifest)) if each.shard]
            end = 0
            for start, saved in sorted(shards, key=lambda item: item[0]):
                assert saved.shard is not None
                if start != end:
                    what = "bytes belong to no shard" if start > end else "bytes belong to two shards"
                    yield Damage(what=what, file=name, rank=rank, start=min(start, end), num_bytes=abs(start - end))
                if (problem := _shard_problem(file, saved, report_bytes)) is not None:
                    yield _shard_damage(saved, problem, name)
                end = start + saved.shard.num_bytes
            if end != manifest.num_bytes:
                what = "bytes belong to no shard"
                yield Damage(what=what, file=name, rank=rank, start=end, num_bytes=manifest.num_bytes - end)
    except FileNotFoundError:
        yield Damage(what="is missing", file=name, rank=rank)
    except OSError as error:
        raise CheckpointError(
            f"{folder / name} cannot be read ({error.strerror}): check its disk and permissions"
        ) from error


def _shard_problem(file: BinaryIO, saved: Saved, report_bytes: Callable[[int], None]) -> str | None:
    """Return what is wrong with the bytes of a stored shard, None if they are those that were saved."""
    assert saved.shard is not None
    file.seek(saved.shard.start)
    digest, left = xxhash.xxh3_128(), saved.shard.num_bytes
    while left:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            return f"{left} bytes are missing"
        digest.update(block)
        report_bytes(len(block))
        left -= len(block)
    return None if digest.hexdigest() == saved.shard.xxh3_128 else "bytes do not match their hash"


def _shard_damage(saved: Saved, what: str, name: str) -> Damage:
    shard = saved.shard
    assert shard is not None
    tensor = f"{saved.name} {list(shard.offsets)}" if shard.offsets else saved.name
    return Damage(what=what, file=name, rank=saved.rank, tensor=tensor, start=shard.start, num_bytes=shard.num_bytes)


def _sections(manifest: RankManifest) -> set[str]:
    return {name.partition("/")[0] for name in manifest.tensors}


def _without_path(error: DamagedCheckpoint, folder: Path) -> str:
    """Return what an error says of a file, without its path and the advice, which the table has."""
    text = str(error).removeprefix(f"{folder}/")
    return text.partition(" ")[2].rsplit(": ", 1)[0] or text
