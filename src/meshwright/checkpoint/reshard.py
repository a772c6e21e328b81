"""reshard: a checkpoint rewritten into files of N ranks, cut as N data-parallel shards are; bit-equal and verified.

Any layout loads any checkpoint, so this is never needed. It saves time: a rank that loads a checkpoint of another
layout reads whole stored shards of which it needs a part, and many small files are slow on object stores. Dim 0 of each
tensor is cut as torch.chunk cuts it, which is what FSDP2 shards, so that each of N ranks reads its own file alone.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.examine.contents import stored_tensors
from meshwright.checkpoint.examine.tensor_statistics import read_shard
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.boxes import Box, intersection
from meshwright.checkpoint.format.durable import remove
from meshwright.checkpoint.format.manifest import is_named_for_another_step, read_index
from meshwright.checkpoint.format.saved import Saved, uncovered
from meshwright.checkpoint.saving import Extent, SaveRequest, bytes_of, explain, finish_save, open_save, write_rank
from meshwright.checkpoint.shards import judge_of
from meshwright.errors import CheckpointError, ConfigError, DamagedCheckpoint
from meshwright.spec.run.checkpoint_findings import ReshardedCheckpoint
from meshwright.units import first_of

MAX_EXTENT_BYTES = 32 << 20
"""Bytes of a written shard, and about a third of what this holds in memory."""


def reshard(
    source: Path, destination: Path, num_ranks: int, report_bytes: Callable[[int], None] = lambda num_bytes: None
) -> ReshardedCheckpoint:
    """Write the checkpoint `source` as the new folder `destination` with the files of `num_ranks` ranks.

    Each byte read is compared with its hash, and each byte written again. Metadata is kept. Raises ConfigError where
    `destination` exists or is named for another step, CheckpointError where the disk is full, DamagedCheckpoint for a
    damaged source; then nothing is left.
    """
    started_s = time.perf_counter()
    if destination.exists() or destination.is_symlink():
        raise ConfigError(f"{destination} exists, and reshard never overwrites: name a new folder, or move it away")
    index, tensors = read_index(source), stored_tensors(source)
    if missing := uncovered(part for parts in tensors.values() for part in parts):
        raise DamagedCheckpoint(f"{source} is incomplete: {first_of(missing)}")
    if num_ranks < 1:
        raise ConfigError(f"ranks = {num_ranks}: must be 1 or more")
    if is_named_for_another_step(destination, index.metadata):
        step = index.metadata["step"]
        raise ConfigError(f"{destination} is named for another step than {source}, step {step}: name it step-{step}")
    request = SaveRequest(destination, index.metadata, index.sections, _kinds(tensors))
    try:
        temporary = Path(open_save(request)["temporary"])
    except OSError as error:
        raise CheckpointError(explain(error, destination)) from error
    try:
        outcomes = [
            write_rank(request, _extents(source, tensors, rank, num_ranks), rank, temporary, report_bytes)
            for rank in range(num_ranks)
        ]
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(explain(error, destination)) from error
        raise
    if (problem := finish_save(request, temporary, outcomes)["error"]) is not None:
        raise CheckpointError(problem)
    found = verify_checkpoint(destination)
    if found.damages:
        remove(destination)
        raise DamagedCheckpoint(f"{destination} differs from what was written: {found.damages[0].what}: check its disk")
    return ReshardedCheckpoint(
        source=str(source),
        destination=str(destination),
        num_ranks_before=len(index.ranks),
        num_ranks=num_ranks,
        num_bytes=found.num_bytes,
        num_shards=found.num_shards,
        duration_s=time.perf_counter() - started_s,
    )


def boxes_of_rank(shape: tuple[int, ...], num_bytes_per_row: int, rank: int, num_ranks: int) -> Iterator[Box]:
    """Yield the boxes of whole rows that `rank` of `num_ranks` holds of a tensor with a dim, none for no row."""
    rows_per_rank = -(-shape[0] // num_ranks)
    start, end = min(rank * rows_per_rank, shape[0]), min((rank + 1) * rows_per_rank, shape[0])
    rows_at_once = max(1, MAX_EXTENT_BYTES // max(1, num_bytes_per_row))
    for row in range(start, end, rows_at_once):
        yield Box((row, *(0 for _ in shape[1:])), (min(rows_at_once, end - row), *shape[1:]))


def _kinds(tensors: dict[str, list[Saved]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (parts[0].dtype, parts[0].shape) for name, parts in tensors.items()}


def _extents(
    source: Path, tensors: dict[str, list[Saved]], rank: int, num_ranks: int
) -> Iterator[tuple[Extent, memoryview]]:
    """Yield what `rank` writes, read when it is asked for."""
    for name, parts in tensors.items():
        dtype, shape = parts[0].dtype, parts[0].shape
        stored = [part for part in parts if part.shard is not None]
        if not stored:
            continue
        if not shape:
            boxes = iter([Box((), ())] if judge_of(name, num_ranks) == rank else [])
        else:
            num_bytes = sum(part.shard.num_bytes for part in stored if part.shard is not None)
            boxes = boxes_of_rank(shape, num_bytes // shape[0], rank, num_ranks)
        for box, data in _filled(source, stored, boxes):
            content = bytes_of(data)
            yield Extent(name, dtype, shape, box, len(content)), content


def _filled(source: Path, stored: list[Saved], boxes: Iterator[Box]) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box with its elements; the last stored shard is kept, of which the next box often has the rest."""
    kept: tuple[Saved, Tensor] | None = None
    for box in boxes:
        target: Tensor | None = None
        for part in stored:
            assert part.shard is not None
            if (common := intersection(part.shard.box, box)) is None:
                continue
            if kept is None or kept[0] is not part:
                kept = None
                kept = part, read_shard(source, part)
            target = torch.empty(box.shape, dtype=kept[1].dtype) if target is None else target
            target[common.within(box)] = kept[1][common.within(part.shard.box)]
        assert target is not None
        yield box, target
