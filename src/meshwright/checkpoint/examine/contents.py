"""summarize: what a checkpoint holds, from its index and manifests; needs no torch and reads no tensor."""

from collections import Counter, defaultdict
from pathlib import Path

from meshwright.checkpoint.format.manifest import read_index, read_manifest
from meshwright.checkpoint.format.saved import Saved, saved_in
from meshwright.errors import ConfigError
from meshwright.spec.problem import did_you_mean
from meshwright.spec.run.checkpoint_findings import CheckpointSummary, StoredShardPlace, StoredTensorSummary


def stored_tensors(folder: Path) -> dict[str, list[Saved]]:
    """Return the stored shards of every tensor by full name; raises CheckpointError for a damaged index or manifest."""
    index = read_index(folder)
    tensors: dict[str, list[Saved]] = defaultdict(list)
    for rank in range(len(index.ranks)):
        for saved in saved_in(read_manifest(folder, index, rank), index.sections):
            tensors[saved.name].append(saved)
    return dict(sorted(tensors.items()))


def summarize(folder: Path) -> CheckpointSummary:
    """Return what the checkpoint in `folder` holds."""
    index = read_index(folder)
    tensors = [summary_of(parts) for parts in stored_tensors(folder).values()]
    by_section: Counter[str] = Counter()
    by_dtype: Counter[str] = Counter()
    for one in tensors:
        by_section[one.name.partition("/")[0]] += one.num_bytes
        by_dtype[one.dtype] += one.num_bytes
    return CheckpointSummary(
        folder=str(folder),
        format_version=index.format_version,
        save_id=index.save_id,
        versions=index.versions,
        metadata=index.metadata,
        num_ranks=len(index.ranks),
        num_bytes=sum(rank.num_bytes for rank in index.ranks),
        bytes_by_section=dict(by_section.most_common()),
        bytes_by_dtype=dict(by_dtype.most_common()),
        tensors=tensors,
    )


def summary_of(parts: list[Saved]) -> StoredTensorSummary:
    """Return the size of one tensor from its stored shards."""
    first, shards = parts[0], [part.shard for part in parts if part.shard is not None]
    return StoredTensorSummary(
        name=first.name,
        dtype=first.dtype,
        shape=list(first.shape),
        num_bytes=sum(shard.num_bytes for shard in shards),
        num_shards=len(shards),
    )


def find_tensor(folder: Path, name: str) -> list[Saved]:
    """Return the stored shards of the tensor `name`, or model/`name`; raises ConfigError for an unknown one."""
    tensors = stored_tensors(folder)
    for full in (name, f"model/{name}"):
        if full in tensors:
            return tensors[full]
    raise ConfigError(f"{folder} holds no tensor {name}{did_you_mean(name, tensors)}")


def places_of(parts: list[Saved]) -> list[StoredShardPlace]:
    """Return where the shards of a tensor are stored, by their offsets."""
    found = [
        StoredShardPlace(
            rank=part.rank,
            offsets=list(part.shard.offsets),
            shape=list(part.shard.shape),
            start=part.shard.start,
            num_bytes=part.shard.num_bytes,
        )
        for part in parts
        if part.shard is not None
    ]
    return sorted(found, key=lambda place: place.offsets)
