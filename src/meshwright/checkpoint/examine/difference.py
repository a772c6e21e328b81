"""difference: how two checkpoints differ, tensor by tensor; at most a few shards are in memory at once."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.examine.contents import stored_tensors
from meshwright.checkpoint.examine.tensor_statistics import read_shard
from meshwright.checkpoint.format.boxes import Box, intersection
from meshwright.checkpoint.format.manifest import read_index
from meshwright.checkpoint.format.saved import Saved, uncovered
from meshwright.errors import DamagedCheckpoint
from meshwright.spec.run.checkpoint_findings import CheckpointDifference, MetadataChange, TensorChange
from meshwright.units import first_of

_MAX_CACHED = 2
"""Shards of the right checkpoint in memory, so that one that several left shards overlap is rarely read twice."""

_BLOCK_ELEMENTS = 1 << 18


def difference(
    left: Path, right: Path, report_tensor: Callable[[str], None] = lambda name: None
) -> CheckpointDifference:
    """Return how the checkpoint `right` differs from `left`; the layouts that saved them need not be equal.

    Raises DamagedCheckpoint where bytes are not those that were saved.
    """
    ours, theirs = _tensors(left), _tensors(right)
    changed: list[TensorChange] = []
    num_equal = 0
    for name in sorted(ours.keys() & theirs.keys()):
        report_tensor(name)
        change = _change(left, ours[name], right, theirs[name])
        changed += [] if change is None else [change]
        num_equal += change is None
    metadata = metadata_changes(read_index(left).metadata, read_index(right).metadata)
    return CheckpointDifference(
        left=str(left),
        right=str(right),
        metadata=[*metadata],
        added=sorted(theirs.keys() - ours.keys()),
        removed=sorted(ours.keys() - theirs.keys()),
        changed=changed,
        num_equal=num_equal,
    )


def metadata_changes(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> Iterator[MetadataChange]:
    """Yield each value that differs, None where a side lacks it, by its dotted path."""
    for key in sorted(left.keys() | right.keys()):
        a, b = _opened(left.get(key)), _opened(right.get(key))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from metadata_changes(a, b, f"{prefix}{key}.")
        elif a != b:
            yield MetadataChange(key=f"{prefix}{key}", left=a, right=b)


def _opened(value: Any) -> Any:
    """Return the dict that a text holds as JSON, as mw.CheckpointFolder keeps plain values; anything else as it is."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _tensors(folder: Path) -> dict[str, list[Saved]]:
    tensors = stored_tensors(folder)
    if missing := uncovered(part for parts in tensors.values() for part in parts):
        raise DamagedCheckpoint(f"{folder} is incomplete: {first_of(missing)}: verify it before comparing")
    return tensors


def _change(left: Path, ours: list[Saved], right: Path, theirs: list[Saved]) -> TensorChange | None:
    """Return how a tensor of both checkpoints differs, None if all bits are equal."""
    name, (dtype, shape), other = ours[0].name, (ours[0].dtype, ours[0].shape), (theirs[0].dtype, theirs[0].shape)
    if (dtype, shape) != other:
        return TensorChange(name=name, what=f"{dtype} {list(shape)} to {other[0]} {list(other[1])}")
    num_changed = num_elements = num_counted = 0
    largest, total = 0.0, 0.0
    for a, b in _common_boxes(left, ours, right, theirs):
        for one, other_one in zip(_blocks(a), _blocks(b), strict=True):
            num_elements += one.numel()
            if torch.equal(one.view(torch.uint8), other_one.view(torch.uint8)):
                num_counted += one.numel()
                continue
            differs, distance = _distances(one, other_one)
            num_changed += differs
            num_counted += distance.numel()
            if distance.numel():
                largest, total = max(largest, float(distance.max())), total + float(distance.sum())
    if num_changed == 0:
        return None
    return TensorChange(
        name=name,
        what="values",
        num_changed=num_changed,
        num_elements=num_elements,
        max_difference=largest,
        mean_difference=total / num_counted if num_counted else 0.0,
    )


def _common_boxes(left: Path, ours: list[Saved], right: Path, theirs: list[Saved]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of each pair of overlapping shards, so that each element is compared once."""
    cached: dict[Box, Tensor] = {}
    by_offsets = sorted((part for part in theirs if part.shard is not None), key=_offsets)
    for part in sorted((part for part in ours if part.shard is not None), key=_offsets):
        assert part.shard is not None
        box, mine = part.shard.box, read_shard(left, part)
        for other in by_offsets:
            assert other.shard is not None
            if (common := intersection(box, other.shard.box)) is None:
                continue
            if other.shard.box not in cached:
                while len(cached) >= _MAX_CACHED:
                    del cached[next(iter(cached))]
                cached[other.shard.box] = read_shard(right, other)
            yield mine[common.within(box)], cached[other.shard.box][common.within(other.shard.box)]


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the elements of a tensor in parts, so that intermediate values stay small."""
    parts: tuple[Tensor, ...] = tensor.contiguous().reshape(-1).split(_BLOCK_ELEMENTS)
    return parts


def _distances(a: Tensor, b: Tensor) -> tuple[int, Tensor]:
    """Return how many elements have other bits, and the absolute differences that are finite, 0 for equal bits."""
    size = a.element_size()
    differs = a.view(torch.uint8).view(-1, size).ne(b.view(torch.uint8).view(-1, size)).any(dim=1)
    distance = (a.to(torch.float64) - b.to(torch.float64)).abs()
    distance[~differs] = 0.0
    return int(differs.sum()), distance[distance.isfinite()]


def _offsets(part: Saved) -> tuple[int, ...]:
    assert part.shard is not None
    return part.shard.offsets
