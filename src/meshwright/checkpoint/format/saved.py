"""Stored shards with their tensors, and whether they cover them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from meshwright.checkpoint.format.boxes import coverage_problem
from meshwright.checkpoint.format.manifest import RankManifest, StoredShard


class Saved(NamedTuple):
    """A stored shard, the rank whose file holds it, and its tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rank: int
    shard: StoredShard | None
    """None for a tensor without elements."""


def saved_in(manifest: RankManifest, sections: Collection[str]) -> list[Saved]:
    """Return the shards in `manifest` of tensors under these top-level keys."""
    saved = []
    for name, tensor in manifest.tensors.items():
        if name.partition("/")[0] in sections:
            shards: list[StoredShard | None] = [*tensor.shards] or [None]
            saved += [Saved(name, tensor.dtype, tensor.shape, manifest.rank, shard) for shard in shards]
    return saved


def uncovered(saved: Iterable[Saved]) -> list[str]:
    """Return a line for each tensor that its saved shards do not cover exactly once, or whose shapes differ."""
    by_name: dict[str, list[Saved]] = defaultdict(list)
    for each in saved:
        by_name[each.name].append(each)
    lines = []
    for name, parts in by_name.items():
        if len({(part.dtype, part.shape) for part in parts}) > 1:
            lines.append(f"{name} has shards of different tensors")
        boxes = [part.shard.box for part in parts if part.shard is not None]
        if (problem := coverage_problem(boxes, parts[0].shape)) is not None:
            lines.append(f"{name}: {problem}")
    return lines


def saved_to_list(saved: Saved) -> list[Any]:
    """Return `saved` as JSON holds it."""
    shard = saved.shard
    stored = None if shard is None else [shard.offsets, shard.shape, shard.start, shard.num_bytes, shard.xxh3_128]
    return [saved.name, saved.dtype, saved.shape, saved.rank, stored]


def saved_from_list(values: Sequence[Any]) -> Saved:
    """Return what `saved_to_list` wrote; its values were validated when the manifest was read."""
    name, dtype, shape, rank, stored = values
    shard = None
    if stored is not None:
        offsets, sizes, start, num_bytes, digest = stored
        shard = StoredShard.model_construct(
            offsets=tuple(offsets), shape=tuple(sizes), start=start, num_bytes=num_bytes, xxh3_128=digest
        )
    return Saved(name, dtype, tuple(shape), rank, shard)
